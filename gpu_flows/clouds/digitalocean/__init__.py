"""DigitalOcean: GPU droplets with 1 or 8 cards, billed until they are destroyed."""

from gpu_flows.clouds.digitalocean.cloud import DigitalOceanCloud

__all__ = ("DigitalOceanCloud",)
