"""From DigitalOcean's list of sizes to offers: pure functions.

Source: ``GET /v2/sizes``. ``price_hourly`` is for the whole droplet with its disks, ``gpu_info.vram`` for all of
its cards together. Stock is told by ``regions`` alone: ``available`` with no region in it was seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gpu_flows.clouds.errors import NotOffered, UnexpectedAnswer
from gpu_flows.gpus.catalog import from_cloud_id, load_catalog, nominal_vram_gb
from gpu_flows.gpus.request import GpuRequest
from gpu_flows.offers import Offer, OfferQuery

CLOUD = "digitalocean"

COUNTS = (1, 8)
"""The numbers of cards that a droplet comes with."""

GPU_REGIONS = ("ams3", "atl1", "nyc2", "ric1", "tor1")
"""Where DigitalOcean has said that it has GPUs; tried once each for a size that is listed nowhere."""

_NOT_SELF_SERVE = ("-spot", "-contracted", "-devcloud")
_MIB = {"mib": 1.0, "mb": 1.0, "gib": 1024.0, "gb": 1024.0, "tib": 1024.0**2, "tb": 1024.0**2}


def refuse_other_counts(request: GpuRequest) -> None:
    """Refuse a request whose every alternative asks for a number of cards that no droplet has.

    Args:
        request: What is asked for.

    Raises:
        NotOffered: Naming what is sold instead.
    """
    asked = [each for each in request.alternatives if not each.is_cpu and each.cloud in (None, CLOUD)]
    if not asked or any(each.count in COUNTS for each in asked):
        return
    catalog = load_catalog()
    cards = {name for each in asked for name in each.variants(catalog=catalog)}
    models = {variant.model.name: variant.model for name in cards if (variant := catalog.variant(name))}
    listings = [model.clouds[CLOUD] for model in models.values() if CLOUD in model.clouds]
    sold = [slug for listing in listings for slug in listing.instances]
    counts = ", ".join(str(each) for each in asked)
    raise NotOffered(
        f"digitalocean rents 1 or 8 cards on a droplet, so not {counts}",
        hint=f"it sells {', '.join(sold)}" if sold else "ask for 1 or 8",
    )


def offers_of(rows: Sequence[Any], query: OfferQuery, *, account: str) -> list[Offer]:
    """Return an offer for each size with GPUs and each region that has it.

    Args:
        rows: The sizes as DigitalOcean lists them.
        query: What is asked for.
        account: Whose offers.

    Raises:
        UnexpectedAnswer: For a row that is no size.
    """
    return [offer for row in rows for offer in _offers(row, query, account)]


def _offers(row: Any, query: OfferQuery, account: str) -> Iterator[Offer]:
    try:
        slug, info = row["slug"], row.get("gpu_info")
        if not info or any(each in slug for each in _NOT_SELF_SERVE):
            return
        count = int(info["count"])
        vram_mib = info["vram"]["amount"] * _MIB[info["vram"]["unit"].lower()] / count
        variant = from_cloud_id(CLOUD, info["model"], vram_mib)
        gpu = variant.name if variant else str(info["model"])
        listed = [str(region) for region in row["regions"]]
        places = [(region, "listed") for region in listed]
        if not places:
            # The listing errs both ways: what it says is nowhere was had all the same.
            places = [(region, "listed nowhere") for region in GPU_REGIONS]
        for region, level in places:
            yield Offer(
                cloud=CLOUD,
                account=account,
                region=region,
                instance_type=slug,
                gpu=gpu,
                gpu_count=count,
                used_count=count,
                vram_gb=nominal_vram_gb(variant, vram_mib),
                vcpus=int(row["vcpus"]),
                usd_per_hour=float(row["price_hourly"]),
                stock_level=level,
                unavailable=_obstacle(row, gpu, query),
                details={"architecture": variant.model.architecture if variant else _guessed(gpu)},
            )
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise UnexpectedAnswer(
            f"digitalocean lists something that is no size: {str(row)[:200]} ({type(error).__name__}: {error})",
            ambiguous=False,
        ) from error


def _obstacle(row: Mapping[str, Any], gpu: str, query: OfferQuery) -> str | None:
    if not row["available"]:
        return "DigitalOcean does not sell it now"
    if query.disk_gb is not None and row["disk"] < query.disk_gb:
        return f"{query.disk_gb} GB of disk are asked for, and it has {row['disk']}"
    counts = {each.count for each in query.request.alternatives if each.accepts(gpu, price_capped=True)}
    if counts and not counts & set(COUNTS):
        return f"droplets have 1 or 8 cards, not {_either(counts)}"
    return None


def _either(counts: Iterable[int]) -> str:
    return " or ".join(map(str, sorted(counts)))


def _guessed(gpu: str) -> str:
    return "rocm" if gpu.lower().startswith("amd") else "cuda"
