"""Vast.ai: a market of other people's machines, rented as containers."""

from gpu_flows.clouds.vastai.cloud import VastaiCloud

__all__ = ["VastaiCloud"]
