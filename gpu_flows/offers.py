"""What can be rented, and in which order it is worth trying."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gpu_flows.gpus.request import GpuRequest


class Spot(StrEnum):
    """Whether interruptible boxes are wanted."""

    NEVER = "never"
    PREFER = "prefer"
    ONLY = "only"


class Strategy(StrEnum):
    """How offers of several alternatives are ordered."""

    ORDERED = "ordered"
    """Alternatives in the order given, price within one."""
    CHEAPEST = "cheapest"
    """Price across all alternatives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferQuery:
    """What a cloud is asked for; clouds may use it to narrow their search, the client decides again.

    Attributes:
        request: The GPUs.
        regions: Regions to keep; empty for all.
        min_vram_gb: Least nominal VRAM per GPU.
        disk_gb: Disk that the price must include.
        spot: Whether interruptible boxes are wanted.
        nodes: Boxes wanted, so that a cloud can say that it cannot connect them.
    """

    request: GpuRequest
    regions: Sequence[str] = ()
    min_vram_gb: float | None = None
    disk_gb: int | None = None
    spot: Spot = Spot.NEVER
    nodes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A box that a cloud says can be rented.

    Attributes:
        cloud: Name of the cloud.
        account: Account that would rent it.
        region: The cloud's region; empty where it has none.
        zone: Zone within the region.
        instance_type: The cloud's own name for the shape, or the id of the ask.
        gpu: Catalog name of the GPU with its variant (``A100-80GB``), the cloud's own name for one that the
            catalog does not know, or None for a CPU box.
        gpu_count: GPUs on the box, all of them rented.
        used_count: GPUs that the request asked for; fewer than rented on whole-node shapes.
        vram_gb: Nominal VRAM per GPU; 0 for a CPU box.
        vcpus: CPU cores of the box, where known.
        usd_per_hour: Dollars per hour for the whole box, disk included.
        price_note: Where the price comes from, when it is not the cloud's own answer.
        spot: Whether it can be interrupted.
        stock: Boxes that can be had now; None when the cloud does not say.
        stock_level: The cloud's own word for the stock.
        minimum_minutes: Shortest time that is billed.
        billing_step_s: Granularity of the bill.
        max_duration_s: Longest life of the box; None for no limit.
        unavailable: Why it cannot be rented now; None when it can.
        alternative: Index of the alternative of the request that it satisfies.
        machine: Identity of the physical host, where the cloud tells, so that a bad one can be avoided.
        details: What the adapter needs to create it; plain JSON.
    """

    cloud: str
    account: str = "default"
    region: str = ""
    zone: str | None = None
    instance_type: str
    gpu: str | None
    gpu_count: int
    used_count: int = 0
    vram_gb: float = 0
    vcpus: int | None = None
    usd_per_hour: float
    price_note: str = ""
    spot: bool = False
    stock: int | None = None
    stock_level: str = ""
    minimum_minutes: int = 0
    billing_step_s: int = 1
    max_duration_s: float | None = None
    unavailable: str | None = None
    alternative: int = 0
    machine: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the offer as plain JSON values."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data["details"] = dict(self.details)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Offer:
        """Rebuild an offer from what `to_json` returned."""
        return cls(**data)
