"""The parameters of renting, the same on every surface, checked before anything is asked of a cloud."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, TypeVar

from gpu_flows.clouds import CloudRef
from gpu_flows.errors import BadRequest, SettingsError
from gpu_flows.gpus.request import GpuRequest
from gpu_flows.offers import OfferQuery, Spot, Strategy
from gpu_flows.settings import Settings

E = TypeVar("E", bound=StrEnum)

Duration = timedelta | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rental:
    """What is wanted, and under which conditions.

    Attributes:
        request: The GPUs, in order of preference.
        clouds: Where to ask, in order, as ``cloud`` or ``cloud@account``.
        regions: Regions to keep; empty for all.
        min_vram_gb: Least nominal VRAM per GPU.
        disk_gb: Disk of each box.
        nodes: Number of boxes.
        image: Image by cloud; the key "" is for every cloud.
        spot: Whether interruptible boxes are wanted.
        price_cap: Dollars per hour for one whole box as billed.
        max_cost: Dollars for the whole run, all its boxes.
        strategy: How offers of several alternatives are ordered.
        max_duration: Of the job, from its start.
        ready_timeout_s: Per box until checked; None for the cloud's own default.
        wait_for_capacity: How long to go on asking.
        allow_unreaped: Rent also where a box cannot end its own billing.
    """

    request: GpuRequest
    clouds: tuple[str, ...]
    regions: tuple[str, ...] = ()
    min_vram_gb: float | None = None
    disk_gb: int | None = None
    nodes: int = 1
    image: Mapping[str, str]
    spot: Spot = Spot.NEVER
    price_cap: float | None = None
    max_cost: float | None = None
    strategy: Strategy = Strategy.ORDERED
    max_duration: timedelta = timedelta(hours=24)
    ready_timeout_s: float | None = None
    wait_for_capacity: timedelta = timedelta(0)
    allow_unreaped: bool = False

    @property
    def query(self) -> OfferQuery:
        """What the clouds are asked."""
        return OfferQuery(
            request=self.request,
            regions=self.regions,
            min_vram_gb=self.min_vram_gb,
            disk_gb=self.disk_gb,
            spot=self.spot,
            nodes=self.nodes,
        )


def rental(
    gpus: Any,
    *,
    settings: Settings,
    clouds: Sequence[str] | str | None = None,
    provider: str | None = None,
    regions: Sequence[str] | str = (),
    min_vram_gb: float | None = None,
    disk_gb: int | None = None,
    nodes: int = 1,
    image: str | Mapping[str, str] | None = None,
    spot: Spot | str = Spot.NEVER,
    price_cap: float | None = None,
    max_cost: float | None = None,
    strategy: Strategy | str = Strategy.ORDERED,
    max_duration: Duration = timedelta(hours=24),
    ready_timeout_s: float | None = None,
    wait_for_capacity: Duration = timedelta(0),
    allow_unreaped: bool = False,
) -> Rental:
    """Check the parameters of renting, and fill in what the installation's settings say.

    Args:
        gpus: A request, or a list of them in order of preference.
        settings: The installation's settings.
        clouds: Where to ask, in order; by default the configured list, and `local` for ``cpu`` alone.
        provider: Another way to write a list of one cloud.
        regions: Regions to keep.
        min_vram_gb: Least nominal VRAM per GPU.
        disk_gb: Disk of each box.
        nodes: Number of boxes.
        image: One image, or a table by cloud.
        spot: ``never``, ``prefer`` or ``only``.
        price_cap: Dollars per hour for one whole box.
        max_cost: Dollars for the whole run.
        strategy: ``ordered`` or ``cheapest``.
        max_duration: Of the job: a timedelta, seconds, or text like ``6h``.
        ready_timeout_s: Per box until checked.
        wait_for_capacity: How long to go on asking, likewise.
        allow_unreaped: Rent also where a box cannot end its own billing.

    Raises:
        BadRequest: Naming the parameter that is wrong.
        SettingsError: When the installation's limits forbid it.
    """
    request = GpuRequest.parse(gpus)
    if provider is not None:
        if clouds is not None:
            raise BadRequest("give clouds= or provider=, not both")
        clouds = [provider]
    asked = [clouds] if isinstance(clouds, str) else list(clouds or ())
    asked = [part for item in asked for part in item.split(",") if part.strip()]
    if not asked:
        asked = ["local"] if request.is_cpu else list(settings.clouds)
    if not asked:
        raise SettingsError(
            f"no cloud is named for {request}",
            hint="name some by clouds, or set GPU_FLOWS_CLOUDS, or clouds in config.toml",
        )
    for name, value in (("price_cap", price_cap), ("max_cost", max_cost), ("min_vram_gb", min_vram_gb)):
        if value is not None and not 0 <= value < float("inf"):
            raise BadRequest(f"{name} cannot be {value}")
    if nodes < 1:
        raise BadRequest(f"nodes cannot be {nodes}")
    checked = Rental(
        request=request,
        clouds=tuple(dict.fromkeys(str(CloudRef.parse(ref)) for ref in asked)),
        regions=tuple(
            part.strip()
            for item in ([regions] if isinstance(regions, str) else regions)
            for part in item.split(",")
            if part.strip()
        ),
        min_vram_gb=min_vram_gb,
        disk_gb=disk_gb,
        nodes=nodes,
        image={"": image} if isinstance(image, str) else dict(image or {}),
        spot=_member(Spot, "spot", spot),
        price_cap=price_cap,
        max_cost=max_cost,
        strategy=_member(Strategy, "strategy", strategy),
        max_duration=duration("max_duration", max_duration),
        ready_timeout_s=ready_timeout_s,
        wait_for_capacity=duration("wait_for_capacity", wait_for_capacity),
        allow_unreaped=allow_unreaped,
    )
    return _within_limits(checked, settings)


def duration(name: str, value: Duration) -> timedelta:
    """Read a length of time: a timedelta, seconds, or text like ``90``, ``6h``, ``1d2h30m``.

    Raises:
        BadRequest: Naming the parameter.
    """
    import re

    if isinstance(value, timedelta):
        found = value
    elif isinstance(value, int | float):
        found = timedelta(seconds=value)
    else:
        parts = re.fullmatch(
            r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?",
            value.strip().lower(),
        )
        if parts is None or not any(parts.groups()):
            raise BadRequest(
                f"{name} cannot be {value!r}", hint="write seconds, or a text like 90s, 6h or 1d12h"
            )
        days, hours, minutes, seconds = (float(part or 0) for part in parts.groups())
        found = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    if found < timedelta(0):
        raise BadRequest(f"{name} cannot be negative: {value}")
    return found


def _member(kind: type[E], name: str, value: E | str) -> E:
    try:
        return kind(str(value).strip().lower())
    except ValueError as error:
        raise BadRequest(f"{name} cannot be {value!r}", hint=f"it is one of {', '.join(kind)}") from error


def _within_limits(rental: Rental, settings: Settings) -> Rental:
    """Refuse what is more than the installation allows; its limit on spend becomes a price cap."""
    from dataclasses import replace

    most = max(
        (alternative.count for alternative in rental.request.alternatives if not alternative.is_cpu),
        default=0,
    )
    if settings.max_gpus is not None and most * rental.nodes > settings.max_gpus:
        raise SettingsError(
            f"{most * rental.nodes} GPUs are more than the {settings.max_gpus} that this installation allows"
        )
    if settings.max_usd_per_hour is None:
        return rental
    cap = settings.max_usd_per_hour / rental.nodes
    return replace(rental, price_cap=cap if rental.price_cap is None else min(cap, rental.price_cap))
