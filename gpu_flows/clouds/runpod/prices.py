"""What RunPod's catalog lists, as offers: one for each card, count, tier and data centre."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpu_flows.clouds.errors import UnexpectedAnswer
from gpu_flows.gpus.catalog import from_cloud_id, nominal_vram_gb
from gpu_flows.gpus.model import Kind
from gpu_flows.gpus.request import GpuAlternative
from gpu_flows.gpus.spelling import key
from gpu_flows.offers import Offer, OfferQuery

CLOUD = "runpod"
TIERS = ("SECURE", "COMMUNITY")
DEFAULT_DISK_GB = 50
DISK_USD_PER_GB_MONTH = 0.10
"""Of a running pod's container disk, which no answer of the API prices: docs.runpod.io/pods/storage."""
STOPPED_VOLUME_USD_PER_GB_MONTH = 0.20
"""Of a stopped pod's own volume; the same page."""
_HOURS_PER_MONTH = 730
_STOCK = ("HIGH", "MEDIUM", "LOW", "NONE")


def hourly(usd_per_gb_month: float, gb: float) -> float:
    """Return what a disk costs, in dollars per hour."""
    return usd_per_gb_month * gb / _HOURS_PER_MONTH


def shape(gpu: str, count: int, tier: str) -> str:
    """Return the name of a shape: RunPod has none of its own."""
    return f"{gpu} x{count} {tier.lower()}"


def wanted_by(query: OfferQuery) -> list[GpuAlternative]:
    """Return the alternatives that RunPod may have something for."""
    return [each for each in query.request.alternatives if not each.is_cpu and each.cloud in (None, CLOUD)]


def offers_of(body: Any, query: OfferQuery, *, account: str, count: int, tier: str) -> Iterator[Offer]:
    """Read one answer of the catalog.

    Args:
        body: ``{"gpus": [...]}``, asked for with availability.
        query: What is asked for.
        account: Whose offers.
        count: The count that the availability is for.
        tier: ``SECURE`` or ``COMMUNITY``.

    Raises:
        UnexpectedAnswer: When it is no catalog.
    """
    asked = [each for each in wanted_by(query) if each.count == count]
    # Upgrades too: whether there is a cap for them is not known here.
    variants = frozenset().union(*(each.variants(price_capped=True) for each in asked))
    raw = {key(each.name) for each in asked if each.kind is Kind.RAW}
    try:
        for row in body["gpus"]:
            variant = from_cloud_id(CLOUD, row["id"])
            if key(row["id"]) in raw or (variant is not None and variant.name in variants):
                yield from _offers(row, query, account, count, tier)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnexpectedAnswer(
            f"runpod's catalog is not as published: {type(error).__name__}: {error}"
        ) from error


def _offers(
    row: Mapping[str, Any], query: OfferQuery, account: str, count: int, tier: str
) -> Iterator[Offer]:
    if not row[tier.lower()]:
        return
    disk_gb = query.disk_gb or DEFAULT_DISK_GB
    gpu, memory_mib = str(row["id"]), int(row["memory"]) * 1024
    variant = from_cloud_id(CLOUD, gpu, memory_mib)
    per_gpu, most = float(row["price"][tier.lower()]), int(row["maxCount"][tier.lower()])
    placed = [(place["id"], place["availability"]) for place in row.get("dataCenters") or ()]
    # Community hosts have no data centre; a shape that none has is one offer, unavailable.
    for region, level in placed or [("", row["availability"])]:
        if level not in _STOCK:
            raise ValueError(f"the availability of {gpu} is {level!r}")
        where = region or f"the {tier.lower()} tier"
        unavailable = f"{where} has none free" if level == "NONE" else None
        if per_gpu <= 0:
            unavailable = f"it has no price in the {tier.lower()} tier"
        if count > most:
            unavailable = f"a pod of the {tier.lower()} tier has at most {most} of them"
        yield Offer(
            cloud=CLOUD,
            account=account,
            region=region,
            instance_type=shape(gpu, count, tier),
            gpu=variant.name if variant else gpu,
            gpu_count=count,
            used_count=count,
            vram_gb=nominal_vram_gb(variant, memory_mib),
            usd_per_hour=round(per_gpu * count + hourly(DISK_USD_PER_GB_MONTH, disk_gb), 6),
            price_note=f"{disk_gb} GB of disk at the list price",
            stock=0 if level == "NONE" else None,
            stock_level=level,
            unavailable=unavailable,
            # RunPod takes a data centre for a preference: only where the user named regions it is a condition.
            details={"gpu": gpu, "tier": tier, "region_is_law": bool(query.regions)},
        )
