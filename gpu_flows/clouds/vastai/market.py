"""The market: what is searched for, and what an ask on it is to us. No network here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_flows.clouds.vastai.failures import is_id
from gpu_flows.gpus.catalog import KNOWN_CARD_SHARE, Catalog, load_catalog, nominal_vram_gb
from gpu_flows.gpus.model import Kind
from gpu_flows.gpus.request import GpuAlternative
from gpu_flows.offers import Offer, OfferQuery

CLOUD = "vastai"
PAGE_ROWS = 64
"""Rows that a search returns at most, whatever limit it is given."""
DEFAULT_DISK_GB = 40
_PRICE_STEP = 1e-6
"""Prices come back rounded: a page begins this much below the last one, so that none is left out."""
_LOWEST_BID, _HIGHEST_BID = 0.001, 128.0
_ARM_HOSTS = frozenset({"GH200 SXM"})
"""Cards whose host is arm64; every other one is wanted on amd64, which is what images and wheels are built for."""


@dataclass(frozen=True, slots=True)
class Standards:
    """What a machine must be to be rented at all.

    Attributes:
        reliability: Vast.ai's own estimate of the share of time that it is up, 0 to 1.
        verified: Only machines that Vast.ai has tested.
        direct_ports: Least number of ports that can be reached from outside.
        bid_factor: What is bid for an interruptible box, over the least bid at the time: at exactly that, the
            next bidder takes the box away.
    """

    reliability: float = 0.95
    verified: bool = True
    direct_ports: int = 1
    bid_factor: float = 1.1


@dataclass(frozen=True, slots=True)
class Search:
    """One search: the asks for one alternative of a request, in one of the two markets.

    Attributes:
        alternative: Index of the alternative.
        names: Vast.ai's names of the cards.
        count: Least number of GPUs.
        least_vram_mib: Least memory per GPU that is asked for.
        disk_gb: Disk that the price includes.
        bid: Interruptible boxes, for which one bids.
        countries: Two-letter codes; empty for all.
        standards: What a machine must be.
    """

    alternative: int
    names: Sequence[str]
    count: int
    least_vram_mib: int
    disk_gb: int
    bid: bool
    countries: Sequence[str]
    standards: Standards

    def body(self, *, from_usd_per_hour: float | None = None, after: bool = False) -> dict[str, Any]:
        """Return the query, as an object: in the string form of the SDK, memory is multiplied by 1000.

        Args:
            from_usd_per_hour: Where this page begins; None for the first page.
            after: Leave that very price out.
        """
        asked: dict[str, Any] = {
            "type": "bid" if self.bid else "on-demand",
            "limit": PAGE_ROWS,
            "order": [["dph_total", "asc"], ["id", "asc"]],
            "allocated_storage": self.disk_gb,
            "disk_space": {"gte": self.disk_gb},
            "gpu_name": {"in": list(self.names)},
            "num_gpus": {"gte": self.count},
            "gpu_ram": {"gte": self.least_vram_mib},
            "cpu_arch": {"in": sorted({_architecture(name) for name in self.names})},
            "rentable": {"eq": True},
            "rented": {"eq": False},
            "external": {"eq": False},
            "direct_port_count": {"gte": self.standards.direct_ports},
            "reliability": {"gte": self.standards.reliability},
        }
        if self.standards.verified:
            asked["verified"] = {"eq": True}
        if self.countries:
            asked["geolocation"] = {"in": list(self.countries)}
        if from_usd_per_hour is not None:
            asked["dph_total"] = (
                {"gt": from_usd_per_hour} if after else {"gte": from_usd_per_hour - _PRICE_STEP}
            )
        return asked


def searches(query: OfferQuery, standards: Standards, catalog: Catalog | None = None) -> list[Search]:
    """Return the searches that a query takes: one for each alternative and market.

    One for all alternatives would do too, but it is ordered by price and cut off at `PAGE_ROWS`: a single cheap
    card would hide every box of eight dear ones.

    Args:
        query: What is asked for.
        standards: What a machine must be.
        catalog: The catalog; None for the installation's.
    """
    catalog = catalog or load_catalog()
    return [
        Search(
            alternative=index,
            names=names,
            count=asked.count,
            least_vram_mib=_least_vram_mib(asked, query, catalog),
            disk_gb=query.disk_gb or DEFAULT_DISK_GB,
            bid=bid,
            countries=_countries(query.regions),
            standards=standards,
        )
        for index, asked in enumerate(query.request.alternatives)
        if (names := _names(asked, catalog))
        for bid in _markets(query)
    ]


def _architecture(name: str) -> str:
    return "arm64" if name in _ARM_HOSTS else "amd64"


def _markets(query: OfferQuery) -> tuple[bool, ...]:
    return {"never": (False,), "prefer": (True, False), "only": (True,)}[query.spot]


def _names(asked: GpuAlternative, catalog: Catalog) -> tuple[str, ...]:
    if asked.is_cpu or asked.cloud not in (None, CLOUD):
        return ()
    if asked.kind is Kind.RAW:
        return (asked.name.replace("_", " "),)
    return catalog.ids_for(CLOUD, asked.variants(price_capped=True, catalog=catalog))


def _least_vram_mib(asked: GpuAlternative, query: OfferQuery, catalog: Catalog) -> int:
    """Return what the server may filter by: well below the nominal size, which no card reports in full."""
    names = asked.variants(price_capped=True, catalog=catalog)
    sizes = [variant.vram_gb for name in names if (variant := catalog.variant(name))]
    # A T4 reports 0.922 of its 16 GB, so the 0.93 of unknown cards would leave it out.
    least_gb = max(query.min_vram_gb or 0, min(sizes, default=0))
    return int(least_gb * 1024 * KNOWN_CARD_SHARE)


def _countries(regions: Sequence[str]) -> tuple[str, ...]:
    """Return the codes of countries that the server may filter by; none where a region is more than that.

    Other words are left to the match, which then names the regions that there are.
    """
    codes = [region.strip().rpartition(",")[2].strip().upper() for region in regions]
    return tuple(dict.fromkeys(codes)) if all(len(code) == 2 for code in codes) else ()


def region_of(geolocation: Any, asked: Iterable[str] = ()) -> tuple[str, str | None]:
    """Return the region and the zone of a place as Vast.ai writes it.

    Args:
        geolocation: ``California, US``; it may be missing.
        asked: Regions that the user asked for: a place that one of them names whole is that region.

    Returns:
        The country and the place: ``US`` and ``California, US``.
    """
    place = " ".join(str(geolocation or "").split())
    if _spelled(place) in {_spelled(region) for region in asked}:
        return place, place
    return place.rpartition(",")[2].strip(), place or None


def _spelled(region: str) -> str:
    return "".join(region.split()).casefold()


def offer_of(
    row: Mapping[str, Any], search: Search, query: OfferQuery, account: str, catalog: Catalog
) -> Offer | None:
    """Return the offer that an ask is; every filter of the search is held against it once more.

    Args:
        row: One of the ``offers`` of the answer.
        search: What it answers.
        query: What the user asked for.
        account: Who would rent it.
        catalog: The catalog.

    Returns:
        The offer; None for a slice of the card of that name, which has too little memory to be it.

    Raises:
        KeyError: When the row lacks something; TypeError or ValueError when something in it makes no sense.
    """
    if not is_id(row["id"]):
        raise ValueError(f"{row['id']!r} is no id of an ask")
    name, memory_mib, count = row["gpu_name"], float(row["gpu_ram"]), int(row["num_gpus"])
    # The memory decides: A100 of 40 and of 80 GB have one name.
    variant = catalog.from_cloud_id(CLOUD, name, memory_mib)
    if variant is None and catalog.called_by(CLOUD, name):
        return None
    price, bid = float(row["dph_total"]), None
    if search.bid:
        least = float(row["min_bid"])
        bid = min(max(round(least * search.standards.bid_factor, 4), least, _LOWEST_BID), _HIGHEST_BID)
        # One pays what one bid, and the disk beside it.
        price = bid + max(0.0, price - float(row.get("dph_base") or least))
    region, zone = region_of(row.get("geolocation"), query.regions)
    cores, seconds = row.get("cpu_cores_effective"), row.get("duration")
    return Offer(
        cloud=CLOUD,
        account=account,
        region=region,
        zone=zone,
        instance_type=f"{count}x {name}",
        gpu=variant.name if variant else name,
        gpu_count=count,
        vram_gb=nominal_vram_gb(variant, memory_mib),
        vcpus=int(cores) if cores else None,
        usd_per_hour=round(price, 6),
        spot=search.bid,
        stock=1,
        max_duration_s=float(seconds) if seconds else None,
        unavailable=_obstacle(row, search),
        alternative=search.alternative,
        machine=str(row["machine_id"]),
        details={
            "ask": row["id"],
            "bid": bid,
            "disk_gb": search.disk_gb,
            "usd_per_gb_down": row.get("inet_down_cost"),
            "usd_per_gb_up": row.get("inet_up_cost"),
        },
    )


def _obstacle(row: Mapping[str, Any], search: Search) -> str | None:
    standards = search.standards
    if row.get("rentable") is False or row.get("rented") is True:
        return "somebody else has rented it"
    reliability = row.get("reliability2", row.get("reliability"))
    if reliability is not None and reliability < standards.reliability:
        return f"its reliability is {reliability:.3f}, at least {standards.reliability:g} is wanted"
    if standards.verified and row.get("verification", "verified") != "verified":
        return f"Vast.ai calls the machine {row['verification']}"
    ports = row.get("direct_port_count")
    if ports is not None and ports < standards.direct_ports:
        return "it has no port that can be reached from outside"
    if row.get("cpu_arch", wanted := _architecture(row["gpu_name"])) != wanted:
        return f"its processor is {row['cpu_arch']}"
    disk_gb = row.get("disk_space")
    if disk_gb is not None and disk_gb < search.disk_gb:
        return f"it has {disk_gb:.0f} GB of disk, {search.disk_gb} are asked for"
    return None


def nothing_found(search: Search, account: str, catalog: Catalog) -> Offer:
    """Return the row for a shape that nobody on the market offers now."""
    called = catalog.called_by(CLOUD, search.names[0])
    known = next((each for each in called if each.vram_gb * 1024 >= search.least_vram_mib), None)
    return Offer(
        cloud=CLOUD,
        account=account,
        instance_type=f"{search.count}x {search.names[0]}",
        gpu=known.name if known else search.names[0],
        gpu_count=search.count,
        vram_gb=known.vram_gb if known else 0,
        usd_per_hour=0.0,
        price_note="nobody names a price",
        spot=search.bid,
        stock=0,
        unavailable="nobody on the market offers it now",
        alternative=search.alternative,
    )
