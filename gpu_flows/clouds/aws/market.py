"""What AWS rents where: every region is asked at once, and what seldom changes is remembered for minutes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from gpu_flows.clock import Clock
from gpu_flows.clouds.aws.answers import MINIMUM_MINUTES
from gpu_flows.clouds.aws.api import AwsApi
from gpu_flows.clouds.aws.images import Images
from gpu_flows.clouds.aws.memo import Memo
from gpu_flows.clouds.aws.network import Network
from gpu_flows.clouds.aws.prices import PriceList, Prices
from gpu_flows.clouds.aws.regions import asked_regions
from gpu_flows.clouds.aws.shapes import CLOUD, Shape, list_prices, shape, unknown_types, wanted_shapes
from gpu_flows.clouds.errors import AuthenticationFailed, CloudError, NotOffered, UnexpectedAnswer
from gpu_flows.gpus.catalog import from_cloud_id, nominal_vram_gb
from gpu_flows.offers import Offer, OfferQuery, Spot

DEFAULT_DISK_GB = 100

REGIONS_AT_ONCE = 16
_LIFETIME_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """What one region answered.

    Attributes:
        name: The region.
        zones: Where each type is rented.
        quotas: vCPUs by quota code; a quota that could not be read is missing.
        spot: Dollars per hour of a spot box, by type and zone.
        obstacle: Why nothing can be rented there; None when something can.
        own_zones: The zones that the user's subnets lie in; None for all.
        described: Types beside the table's.
    """

    name: str
    zones: Mapping[str, Sequence[str]] = field(default_factory=dict)
    quotas: Mapping[str, float] = field(default_factory=dict)
    spot: Mapping[tuple[str, str], float] = field(default_factory=dict)
    obstacle: str | None = None
    own_zones: frozenset[str] | None = None
    described: Sequence[Shape] = ()

    @property
    def is_silent(self) -> bool:
        """Whether it did not say what it has."""
        return self.obstacle is not None and not self.zones


class Market:
    """Offers of one account.

    Args:
        api: The account.
        account: Its name.
        images: Tells whether a region has an image.
        network: Tells in which zones the user's subnets lie.
        prices: Tells what boxes cost.
        image: The image that boxes boot unless they are told otherwise.
        regions: The only regions to rent in; empty for every one that is enabled.
        public: Whether boxes get a public address, which costs.
        clock: Time.
    """

    def __init__(
        self,
        api: AwsApi,
        *,
        account: str,
        images: Images,
        network: Network,
        prices: Prices,
        image: str | None,
        regions: Sequence[str],
        public: bool,
        clock: Clock,
    ) -> None:
        self._api = api
        self._account = account
        self._images = images
        self._network = network
        self._prices = prices
        self._image = image
        self._only = tuple(regions)
        self._public = public
        self._enabled = Memo[tuple[str, ...]](_LIFETIME_S, clock)
        self._zones = Memo[dict[str, list[str]]](_LIFETIME_S, clock)
        self._quotas = Memo[float | None](_LIFETIME_S, clock)

    def regions(self) -> tuple[str, ...]:
        """Return every region in which boxes of ours can be: the only ones, or all that are enabled."""
        if self._only:
            return asked_regions(self._only, self._api.known_regions())
        return self._enabled.get("regions", self._ask_regions)

    def offers(self, query: OfferQuery) -> list[Offer]:
        """Return what can be rented, and what cannot with its reason.

        Raises:
            CloudError: When no region could be asked.
        """
        shapes = wanted_shapes(query.request)
        unknown = unknown_types(query.request, shapes)
        if not shapes and not unknown:
            return []
        regions = self._chosen(query)
        with ThreadPoolExecutor(REGIONS_AT_ONCE) as pool:
            prices = pool.submit(self._prices.of, [*(each.type for each in shapes), *unknown])
            answers = [pool.submit(partial(self._ask, name, shapes, unknown, query)) for name in regions]
            found = [answer.result() for answer in answers]
        failures = [each for each in found if isinstance(each, CloudError)]
        if len(failures) == len(found) and failures:
            raise failures[0]
        asked: list[Region] = [
            Region(name=name, obstacle=str(each)) if isinstance(each, CloudError) else each
            for name, each in zip(regions, found, strict=True)
        ]
        shapes += {each.type: each for region in asked for each in region.described}.values()
        writer = _Writer(self._account, query, prices.result(), public=self._public)
        return [offer for each in shapes for offer in writer.offers(each, asked)]

    def _chosen(self, query: OfferQuery) -> tuple[str, ...]:
        ours = self.regions()
        asked = asked_regions(query.regions, self._api.known_regions())
        chosen = tuple(name for name in asked if name in ours) if asked else ours
        if not chosen:
            raise NotOffered(
                f"the account of aws rents in {', '.join(ours)} only, not in {', '.join(asked)}",
                hint="enable the region for the account, or name others",
            )
        return chosen

    def _ask_regions(self) -> tuple[str, ...]:
        home = self._api.home_region
        listed = self._api.pages("ec2", home, "describe_regions", "Regions", AllRegions=False)
        names = sorted(each["RegionName"] for each in listed)
        if not names:
            raise UnexpectedAnswer("aws lists no region at all")
        return tuple(sorted(names, key=lambda name: name != home))

    def _ask(
        self, region: str, shapes: Sequence[Shape], unknown: Sequence[str], query: OfferQuery
    ) -> Region | CloudError:
        try:
            return self._answer(region, shapes, unknown, query)
        except CloudError as error:
            return error
        except (KeyError, TypeError, ValueError) as error:
            return UnexpectedAnswer(f"aws answered for {region} in an unknown way: {error!r}")

    def _answer(
        self, region: str, shapes: Sequence[Shape], unknown: Sequence[str], query: OfferQuery
    ) -> Region:
        described = self._describe(region, unknown) if unknown else []
        wanted = [*shapes, *described]
        zones = self._zones.get(
            (region, tuple(sorted(each.type for each in wanted))),
            lambda: self._ask_zones(region, [each.type for each in wanted]),
        )
        here = [each for each in wanted if each.type in zones and not each.unavailable]
        answer = Region(name=region, zones=zones, described=described)
        if not here:
            return answer
        answer = replace(
            answer, quotas=self._ask_quotas(region, here, query), own_zones=self._network.zones(region)
        )
        if not any(self._may_rent(each, answer, query) for each in here):
            return answer
        try:
            self._images.of(region, self._image)
        except NotOffered as error:
            return replace(answer, obstacle=error.message)
        if query.spot is Spot.NEVER:
            return answer
        try:
            return replace(answer, spot=self._ask_spot(region, [each.type for each in here]))
        except AuthenticationFailed:
            return answer  # whoever may not read spot prices may still rent on demand

    @staticmethod
    def _may_rent(each: Shape, region: Region, query: OfferQuery) -> bool:
        return any(_quota_obstacle(each, region, spot, query.nodes) is None for spot in _markets(query))

    def _ask_zones(self, region: str, types: Sequence[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for offering in self._api.pages(
            "ec2",
            region,
            "describe_instance_type_offerings",
            "InstanceTypeOfferings",
            LocationType="availability-zone",
            Filters=[{"Name": "instance-type", "Values": list(types)}],
        ):
            found.setdefault(offering["InstanceType"], []).append(offering["Location"])
        return {name: sorted(zones) for name, zones in found.items()}

    def _ask_quotas(self, region: str, shapes: Sequence[Shape], query: OfferQuery) -> dict[str, float]:
        codes = {code for each in shapes for spot in _markets(query) if (code := _quota_code(each, spot))}
        read = {
            code: self._quotas.get((region, code), partial(self._ask_quota, region, code))
            for code in sorted(codes)
        }
        return {code: value for code, value in read.items() if value is not None}

    def _ask_quota(self, region: str, code: str) -> float | None:
        try:
            answer = self._api.read(
                "service-quotas", region, "get_service_quota", ServiceCode="ec2", QuotaCode=code
            )
        except CloudError:
            # Often not allowed, and never needed: the create call then says whether the quota suffices.
            return None
        value = answer.get("Quota", {}).get("Value")
        return float(value) if isinstance(value, int | float) else None

    def _ask_spot(self, region: str, types: Sequence[str]) -> dict[tuple[str, str], float]:
        listed = self._api.pages(
            "ec2",
            region,
            "describe_spot_price_history",
            "SpotPriceHistory",
            InstanceTypes=list(types),
            ProductDescriptions=["Linux/UNIX"],
            StartTime=self._api.now(),
        )
        newest: dict[tuple[str, str], tuple[Any, float]] = {}
        for each in listed:
            key = (each["InstanceType"], each["AvailabilityZone"])
            if key not in newest or each["Timestamp"] > newest[key][0]:
                newest[key] = (each["Timestamp"], float(each["SpotPrice"]))
        return {key: usd for key, (_, usd) in newest.items()}

    def _describe(self, region: str, types: Sequence[str]) -> list[Shape]:
        filters = [{"Name": "instance-type", "Values": list(types)}]
        listed = self._api.pages("ec2", region, "describe_instance_types", "InstanceTypes", Filters=filters)
        return [found for each in listed if (found := _described(each))]


class _Writer:
    """Writes offers from what the regions answered: no calls any more."""

    def __init__(self, account: str, query: OfferQuery, prices: PriceList, *, public: bool) -> None:
        self._account = account
        self._query = query
        self._prices = prices
        self._disk_gb = max(query.disk_gb or 0, DEFAULT_DISK_GB)
        self._address_usd = list_prices().public_ipv4_usd_per_hour if public else 0.0

    def offers(self, each: Shape, regions: Sequence[Region]) -> Iterator[Offer]:
        here = [region for region in regions if each.type in region.zones or region.is_silent]
        for region in here:
            for spot in _markets(self._query):
                yield from self._in_region(each, region, spot)
        if not here:
            # Of the regions asked for, or of none: so that filters by region keep the row.
            asked = [region.name for region in regions] if self._query.regions else []
            lacking = f"aws has no {each.type} in {', '.join(asked) or 'any region'}"
            yield self._offer(each, next(iter(asked), ""), None, spot=False, unavailable=lacking)

    def _in_region(self, each: Shape, region: Region, spot: bool) -> Iterator[Offer]:
        obstacle = each.unavailable or region.obstacle
        obstacle = obstacle or _quota_obstacle(each, region, spot, self._query.nodes)
        price = self._prices.on_demand(each, region.name)
        if obstacle is None and not spot and price.usd is None:
            obstacle = f"aws names no price on demand in {region.name}: it may sell Capacity Blocks only"
        if obstacle is not None:
            yield self._offer(each, region.name, None, spot=spot, unavailable=obstacle)
            return
        for zone in region.zones[each.type]:
            usd = region.spot.get((each.type, zone)) if spot else price.usd
            lacking = None
            if region.own_zones is not None and zone not in region.own_zones:
                lacking = f"none of subnet_ids is in {zone}"
            elif usd is None:
                lacking = f"aws names no spot price in {zone}"
            note = "" if spot else price.note
            yield self._offer(each, region.name, zone, spot=spot, usd=usd, note=note, unavailable=lacking)

    def _offer(
        self,
        each: Shape,
        region: str,
        zone: str | None,
        *,
        spot: bool,
        usd: float | None = None,
        note: str = "",
        unavailable: str | None,
    ) -> Offer:
        if usd is None:
            price = self._prices.on_demand(each, region)
            usd = price.usd if price.usd is not None else each.usd_per_hour or 0.0
        disk = self._prices.disk(region, self._disk_gb)
        return Offer(
            cloud=CLOUD,
            account=self._account,
            region=region,
            zone=zone,
            instance_type=each.type,
            gpu=each.gpu,
            gpu_count=each.gpu_count,
            vram_gb=each.vram_gb,
            vcpus=each.vcpus,
            usd_per_hour=round(usd + disk + self._address_usd, 6),
            price_note=note,
            spot=spot,
            minimum_minutes=MINIMUM_MINUTES,
            unavailable=unavailable,
            details={
                "disk_gb": self._disk_gb,
                "instance_usd_per_hour": usd,
                "nodes": self._query.nodes,
            },
        )


def _markets(query: OfferQuery) -> tuple[bool, ...]:
    """Return the markets worth asking: False for on demand, True for spot."""
    return {Spot.NEVER: (False,), Spot.PREFER: (False, True), Spot.ONLY: (True,)}[query.spot]


def _quota_code(each: Shape, spot: bool) -> str | None:
    return each.quotas.get("spot" if spot else "on_demand")


def _quota_obstacle(each: Shape, region: Region, spot: bool, nodes: int) -> str | None:
    """Return why the quota does not allow so many boxes of a type; None when it does, or nobody knows."""
    code = _quota_code(each, spot)
    most = region.quotas.get(code) if code else None
    if most is None or each.vcpus is None or most >= each.vcpus * nodes:
        return None
    market = "spot" if spot else "on demand"
    needed = f"{nodes} x {each.vcpus}" if nodes > 1 else str(each.vcpus)
    return f"the quota {code} in {region.name} allows {most:g} vCPUs {market}, and {needed} are needed"


def _described(data: Mapping[str, Any]) -> Shape | None:
    """Return a type that the table does not hold; None when it has no whole GPU of x86-64."""
    cards = [card for card in data.get("GpuInfo", {}).get("Gpus", []) if card.get("Count", 0) >= 1]
    machines = data.get("ProcessorInfo", {}).get("SupportedArchitectures", ["x86_64"])
    if len(cards) != 1 or "x86_64" not in machines:
        return None
    name, mib = str(cards[0]["Name"]), float(cards[0]["MemoryInfo"]["SizeInMiB"])
    variant = from_cloud_id(CLOUD, name, mib)
    return shape(
        data["InstanceType"],
        gpu=variant.name if variant else name,
        gpu_count=cards[0]["Count"],
        vram_gb=nominal_vram_gb(variant, mib),
        vcpus=data.get("VCpuInfo", {}).get("DefaultVCpus"),
    )
