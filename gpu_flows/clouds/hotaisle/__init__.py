"""Hot Aisle: virtual machines with AMD MI300X cards, whose names come only after they exist."""

from gpu_flows.clouds.hotaisle.cloud import HotAisleCloud

__all__ = ("HotAisleCloud",)
