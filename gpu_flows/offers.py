"""What can be rented, and in which order it is worth trying.

Everything here is pure: clouds bring offers in, `match` judges them, `rank` orders them, `explain_no_offer`
says why none is left.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gpu_flows.errors import BadRequest
from gpu_flows.gpus.catalog import REPORTED_SHARE, Catalog, load_catalog
from gpu_flows.gpus.model import GpuVariant, Kind
from gpu_flows.gpus.request import GpuRequest
from gpu_flows.gpus.spelling import did_you_mean, key


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


def account_ref(cloud: str, account: str) -> str:
    """Return how users write an account of a cloud: ``cloud``, or ``cloud@account``."""
    return cloud if account == "default" else f"{cloud}@{account}"


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

    @property
    def ref(self) -> str:
        """The account that rents it out, as users write it: ``cloud``, or ``cloud@account``."""
        return account_ref(self.cloud, self.account)

    def to_json(self) -> dict[str, Any]:
        """Return the offer as plain JSON values."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data["details"] = dict(self.details)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Offer:
        """Rebuild an offer from what `to_json` returned."""
        return cls(**data)


class Misfit(StrEnum):
    """Why an offer of the right card is not one to rent, in the order in which it is looked at."""

    COUNT = "too few"
    MEMORY = "too little memory"
    REGION = "another region"
    SPOT = "spot"
    DURATION = "too short a life"
    STOCK = "not available"
    PRICE = "too dear"


def match(
    offers: Iterable[Offer],
    query: OfferQuery,
    *,
    price_cap: float | None = None,
    needed_s: float | None = None,
    catalog: Catalog | None = None,
) -> list[Offer]:
    """Return the offers of the cards that are asked for, each one judged.

    A box with more GPUs than asked for is as good (``used_count`` tells how many are): its whole price has to
    pass the cap. Upgrades count only under a cap, and never for an alternative with ``!``.

    Args:
        offers: What the clouds answered, in any order.
        query: What is asked for.
        price_cap: Dollars per hour for one whole box; None for no limit.
        needed_s: How long a box has to live, in seconds; None when that does not matter.
        catalog: The catalog; None for the installation's.

    Returns:
        Offers in the order given, with ``alternative``, ``used_count`` and nominal ``vram_gb`` set, and with
        ``unavailable`` where one does not fit. The cap is the last thing looked at: an offer that is
        unavailable for its price is right in all else. Offers of other cards are left out.

    Raises:
        BadRequest: When the cap is no price.
    """
    judge = _Judge(query, price_cap, needed_s, catalog or load_catalog())
    return [judged for offer in offers if (judged := judge.judged(offer))]


def rank(
    offers: Iterable[Offer],
    strategy: Strategy = Strategy.ORDERED,
    *,
    spot: Spot = Spot.NEVER,
    clouds: Sequence[str] = (),
) -> list[Offer]:
    """Return the offers in the order in which they are worth trying.

    Available ones come first. Then `ORDERED` goes by alternative and within one by price, `CHEAPEST` by price
    alone; with spot preferred, interruptible offers come before the others of their alternative, whatever the
    price. Ties go to the earlier alternative, the smaller box, the earlier cloud, and then by name, so that the
    order in which clouds answer makes no difference; only offers alike in all of this keep the order given.

    Args:
        offers: What `match` returned.
        strategy: Whether alternatives are an order of preference.
        spot: Only `PREFER` makes a difference.
        clouds: Clouds in the order given by the user, ``runpod@team_a`` for one account.
    """
    ordered, prefer = strategy is Strategy.ORDERED, spot is Spot.PREFER
    place = {cloud: index for index, cloud in enumerate(clouds)}

    def worth(offer: Offer) -> tuple[Any, ...]:
        price = offer.usd_per_hour
        return (
            offer.unavailable is not None,
            offer.alternative if ordered else 0,
            prefer and not offer.spot,
            price if price == price else math.inf,  # NaN would make the order depend on the input
            offer.alternative,
            offer.gpu_count,
            place.get(f"{offer.cloud}@{offer.account}", place.get(offer.cloud, len(place))),
            offer.cloud,
            offer.account,
            offer.region,
            offer.zone or "",
            offer.instance_type,
            offer.gpu or "",
            offer.machine or "",
            offer.spot,
        )

    return sorted(offers, key=worth)


def explain_no_offer(
    matched: Sequence[Offer],
    query: OfferQuery,
    *,
    price_cap: float | None = None,
    needed_s: float | None = None,
    catalog: Catalog | None = None,
) -> str:
    """Return one paragraph on why nothing fits, with the cheapest offer where the cap is the reason.

    Args:
        matched: What `match` returned for the same query, cap and time; none of it available.
        query: What was asked for.
        price_cap: The cap that `match` was given.
        needed_s: The time that `match` was given.
        catalog: The catalog; None for the installation's.
    """
    asked = f"no offer fits {query.request}"
    if not matched:
        return f"{asked}: none of the clouds that were asked rents it"
    judge = _Judge(query, price_cap, needed_s, catalog or load_catalog())
    kinds: dict[Misfit, list[Offer]] = {}
    for offer in matched:
        if offer.unavailable is None:
            return f"an offer fits {query.request}: {_described(offer)}"
        kinds.setdefault(judge.misfit_of(offer), []).append(offer)
    reasons = [_reason(kind, kinds[kind], query, price_cap) for kind in Misfit if kind in kinds]
    return f"{asked}: {len(matched)} of that kind were found, {'; '.join(reasons)}"


def resolve_regions(
    asked: Iterable[str], known: Iterable[str], *, aliases: Mapping[str, Sequence[str]] | None = None
) -> tuple[str, ...]:
    """Return a cloud's own names for the regions that a user wrote; case and blanks do not count.

    For a cloud that knows all its regions: it resolves once and uses the result for every call.

    Args:
        asked: What the user wrote.
        known: The cloud's regions.
        aliases: Friendly names, each for one or several regions.

    Raises:
        BadRequest: For a region that the cloud does not have; it lists those that it has.
    """
    names = sorted(known)
    table = {_region_key(alias): tuple(regions) for alias, regions in (aliases or {}).items()}
    table |= {_region_key(name): (name,) for name in names}
    found: list[str] = []
    for name in asked:
        regions = table.get(_region_key(name))
        if regions is None:
            listed = f"its regions are {', '.join(names)}"
            hint = "; ".join(filter(None, (did_you_mean(name, names), listed)))
            raise BadRequest(f"the cloud has no region {name!r}", hint=hint)
        found += regions
    return tuple(dict.fromkeys(found))


def _region_key(name: str) -> str:
    return "".join(name.split()).casefold()


class _Judge:
    """Holds offers against one query. What depends on the query or the card alone is worked out once."""

    def __init__(
        self, query: OfferQuery, price_cap: float | None, needed_s: float | None, catalog: Catalog
    ) -> None:
        if price_cap is not None and not 0 <= price_cap < math.inf:
            raise BadRequest(f"the price cap {price_cap!r} is no price", hint="dollars per hour for one box")
        self._query = query
        self._cap = price_cap
        self._needed_s = needed_s or 0.0
        self._catalog = catalog
        self._alternatives = query.request.alternatives
        self._variants = [
            each.variants(price_capped=price_cap is not None, catalog=catalog) for each in self._alternatives
        ]
        self._by_name = any(each.kind in (Kind.RAW, Kind.INSTANCE) for each in self._alternatives)
        self._regions = frozenset(map(_region_key, query.regions))
        self._region_fits: dict[str, bool] = {}
        # What is known of each card met so far: its variant, and the alternatives that it satisfies.
        self._cards: dict[tuple[str | None, float], tuple[GpuVariant | None, tuple[int, ...]]] = {}

    def judged(self, offer: Offer) -> Offer | None:
        """Return the offer as it stands to the query; None when it is of another card."""
        variant, fitting = self._card(offer)
        if not fitting:
            return None
        enough = (index for index in fitting if self._alternatives[index].count <= self._size(offer, index))
        index = next(enough, fitting[0])
        asked = self._alternatives[index]
        found = self._misfit(offer, index, variant)
        return dataclasses.replace(
            offer,
            gpu=variant.name if variant else offer.gpu,
            vram_gb=variant.vram_gb if variant else offer.vram_gb,
            alternative=index,
            used_count=0 if asked.is_cpu else asked.count,
            unavailable=found[1] if found else None,
        )

    def misfit_of(self, offer: Offer) -> Misfit:
        """Return the kind of what `judged` found wrong with an offer that it returned."""
        as_if_available = dataclasses.replace(offer, unavailable=None)
        found = self._misfit(as_if_available, offer.alternative, self._card(offer)[0])
        return found[0] if found and found[1] == offer.unavailable else Misfit.STOCK

    def _card(self, offer: Offer) -> tuple[GpuVariant | None, tuple[int, ...]]:
        known = self._cards.get((offer.gpu, offer.vram_gb))
        if known is None:
            variant = None
            if offer.gpu is not None:
                reported_mib = offer.vram_gb * 1024 or None
                variant = self._catalog.variant(offer.gpu)
                variant = variant or self._catalog.from_product_name(offer.gpu, reported_mib)
            known = self._cards[(offer.gpu, offer.vram_gb)] = variant, self._satisfied_by(offer, variant)
        if self._by_name:  # then the card alone does not tell
            known = known[0], self._satisfied_by(offer, known[0])
        return known

    def _satisfied_by(self, offer: Offer, variant: GpuVariant | None) -> tuple[int, ...]:
        name = variant.name if variant else None
        return tuple(i for i in range(len(self._alternatives)) if self._satisfies(offer, i, name))

    def _satisfies(self, offer: Offer, index: int, variant: str | None) -> bool:
        asked = self._alternatives[index]
        match asked.kind:
            case Kind.CPU:
                return offer.gpu is None
            case Kind.INSTANCE:
                return offer.cloud == asked.cloud and key(offer.instance_type) == key(asked.name)
            case Kind.RAW:
                called = {each.name for each in self._catalog.called_by(offer.cloud, asked.name)}
                theirs = {key(offer.gpu or ""), key(offer.instance_type)}
                return offer.gpu is not None and (key(asked.name) in theirs or variant in called)
            case _:
                return variant in self._variants[index]

    def _size(self, offer: Offer, index: int) -> float:
        """Return how much the box has of what is counted: GPUs, or cores, of which a cloud may not tell."""
        if self._alternatives[index].is_cpu:
            return math.inf if offer.vcpus is None else offer.vcpus
        return offer.gpu_count

    def _misfit(self, offer: Offer, index: int, variant: GpuVariant | None) -> tuple[Misfit, str] | None:
        query, asked = self._query, self._alternatives[index]
        size = self._size(offer, index)
        if size < asked.count:
            what = "cores" if asked.is_cpu else "GPUs"
            return Misfit.COUNT, f"has {size:g} {what}, {asked.count} are asked for"
        least = query.min_vram_gb
        if least is not None:
            share = 1.0 if variant else REPORTED_SHARE
            memory = variant.vram_gb if variant else offer.vram_gb
            if memory < least * share:
                return Misfit.MEMORY, f"has {memory:g} GB a GPU, at least {least:g} are asked for"
        if self._regions and not self._in_region(offer.region):
            return Misfit.REGION, f"is in {offer.region or 'no region'}, not in {', '.join(query.regions)}"
        if offer.spot and query.spot is Spot.NEVER:
            return Misfit.SPOT, "can be interrupted, and spot is never"
        if not offer.spot and query.spot is Spot.ONLY:
            return Misfit.SPOT, "cannot be interrupted, and spot is only"
        longest = offer.max_duration_s
        if longest is not None and longest < self._needed_s:
            hours = f"{longest / 3600:.3g} h at most, {self._needed_s / 3600:.3g} h are needed"
            return Misfit.DURATION, f"lives {hours}"
        if offer.unavailable is not None:
            return Misfit.STOCK, offer.unavailable
        if offer.stock == 0:
            return Misfit.STOCK, "none in stock"
        price = offer.usd_per_hour
        if not 0 <= price < math.inf:
            return Misfit.STOCK, f"its price {price!r} is none"
        if self._cap is not None and price > self._cap:
            return Misfit.PRICE, f"costs {_usd(price)}, over the cap of {_usd(self._cap)}"
        return None

    def _in_region(self, region: str) -> bool:
        fits = self._region_fits.get(region)
        if fits is None:
            name = _region_key(region)
            # A part of the world stands for all of its regions: "us-west" for us-west-1 and us-west-2.
            fits = any(name == asked or name.startswith(f"{asked}-") for asked in self._regions)
            self._region_fits[region] = fits
        return fits


def _reason(kind: Misfit, offers: Sequence[Offer], query: OfferQuery, price_cap: float | None) -> str:
    number = len(offers)
    match kind:
        case Misfit.COUNT:
            largest = max(offers, key=lambda offer: offer.gpu_count)
            return f"{number} too small (the largest: {_described(largest)})"
        case Misfit.MEMORY:
            most = max(offer.vram_gb for offer in offers)
            return f"{number} with too little memory (the most is {most:g} GB a GPU)"
        case Misfit.REGION:
            regions = sorted({offer.region for offer in offers if offer.region})
            return f"{number} in other regions ({', '.join(regions[:8]) or 'unnamed'})"
        case Misfit.SPOT:
            nature = "that can be interrupted" if query.spot is Spot.NEVER else "that cannot be interrupted"
            return f"{number} {nature} (spot is {query.spot})"
        case Misfit.DURATION:
            return f"{number} that cannot live as long as is needed"
        case Misfit.STOCK:
            common, _ = Counter(offer.unavailable for offer in offers).most_common(1)[0]
            return f"{number} not to be had now (such as: {common})"
        case Misfit.PRICE:
            cheapest = rank(offers, Strategy.CHEAPEST)[0]
            return (
                f"{number} over the price cap of {_usd(price_cap or 0)}, the cheapest {_described(cheapest)}"
            )


def _described(offer: Offer) -> str:
    card = f"{offer.gpu_count} x {offer.gpu}" if offer.gpu else "CPU"
    place = " ".join(filter(None, (offer.cloud, offer.region)))
    return f"{card} at {place} for {_usd(offer.usd_per_hour)}"


def _usd(price: float) -> str:
    return f"{price:.6g} USD/h"
