"""AWS: what is offered where, for how much, and why not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gpu_flows.clouds.aws import AwsCloud
from gpu_flows.clouds.aws.shapes import known_shapes, list_prices
from gpu_flows.clouds.errors import AuthenticationFailed, NotOffered
from gpu_flows.gpus.request import GpuRequest
from gpu_flows.offers import Offer, OfferQuery, Spot, match, rank
from tests.clouds.aws_account import opened, share_models
from tests.emulators.aws import AwsEmulator, refuse, refuse_json
from tests.emulators.clock import FakeClock
from tests.emulators.http import instead

FAMILIES = ["g4dn", "g5", "g6", "g6e", "gr6", "g7e", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200", "p6-b300"]
IPV4, DISK = 0.005, 0.08 * 100 / 730


@pytest.fixture(scope="module", autouse=True)
def _models() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        share_models(patch)
        yield


@pytest.fixture
def emulator() -> Iterator[AwsEmulator]:
    with AwsEmulator() as emulator:
        yield emulator
        assert not emulator.live()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(datetime.now(UTC))


@pytest.fixture
def options(emulator: AwsEmulator, clock: FakeClock, tmp_path: Path) -> dict[str, Any]:
    return {"clock": clock, "cache": str(tmp_path / "cache")}


@pytest.fixture
def cloud(emulator: AwsEmulator, options: dict[str, Any]) -> AwsCloud:
    return opened(emulator, **options)


def asking(request: str, **wanted: Any) -> OfferQuery:
    return OfferQuery(request=GpuRequest.parse(request), **wanted)


def available(offers: list[Offer]) -> list[Offer]:
    return [offer for offer in offers if offer.unavailable is None]


def test_the_table_knows_every_family_with_vcpus_and_quotas() -> None:
    shapes = known_shapes()
    assert {name.partition(".")[0] for name in shapes} >= set(FAMILIES)
    for shape in shapes.values():
        assert shape.vcpus, shape.type
        assert shape.quotas.get("on_demand"), shape.type
        assert (shape.usd_per_hour is None) == (shape.type == "p5e.48xlarge"), shape.type


def test_the_table_agrees_with_what_aws_says_of_its_types(cloud: AwsCloud) -> None:
    shapes = known_shapes()
    told = {
        each["InstanceType"]: each
        for each in cloud._api.pages(
            "ec2",
            "us-east-1",
            "describe_instance_types",
            "InstanceTypes",
            Filters=[{"Name": "instance-type", "Values": list(shapes)}],
        )
    }
    assert len(told) > 40
    for name, each in told.items():
        assert shapes[name].vcpus == each["VCpuInfo"]["DefaultVCpus"], name
        (card,) = each["GpuInfo"]["Gpus"]
        assert shapes[name].gpu_count == card["Count"], name
        assert card["MemoryInfo"]["SizeInMiB"] >= 0.9 * 1024 * shapes[name].vram_gb, name


def test_an_offer_is_a_whole_box_with_disk_and_address(cloud: AwsCloud) -> None:
    offers = available(cloud.offers(asking("g4dn.12xlarge")))
    assert {o.region for o in offers} == {"us-east-1", "us-east-2", "us-west-2", "eu-west-1"}
    first = next(o for o in offers if o.zone == "us-east-1a")
    assert first.usd_per_hour == pytest.approx(3.912 + DISK + IPV4, abs=1e-6)
    assert (first.gpu, first.gpu_count, first.vram_gb, first.vcpus) == ("T4", 4, 16, 48)
    assert first.price_note == ""
    larger = available(cloud.offers(asking("g4dn.12xlarge", disk_gb=1000)))
    assert min(o.usd_per_hour for o in larger) == pytest.approx(3.912 + 10 * DISK + IPV4, abs=1e-6)


def test_a_whole_node_serves_a_smaller_count_and_says_how_many_are_used(cloud: AwsCloud) -> None:
    query = asking("A100:2")
    judged = available(match(cloud.offers(query), query, price_cap=30))
    assert {(o.instance_type, o.gpu_count, o.used_count) for o in judged} == {
        ("p4d.24xlarge", 8, 2),
        ("p4de.24xlarge", 8, 2),
    }


def test_c23_memory_is_what_the_card_is_sold_with(cloud: AwsCloud) -> None:
    query = asking("L4:1", min_vram_gb=24)
    assert {o.vram_gb for o in available(match(cloud.offers(query), query))} == {24}


def test_what_no_region_has_is_one_row(emulator: AwsEmulator, cloud: AwsCloud) -> None:
    emulator.regions = ("us-west-2",)
    (offer,) = [o for o in cloud.offers(asking("p6-b300.48xlarge")) if "us-east-1" not in o.region][:1]
    emulator.always["DescribeInstanceTypeOfferings"] = lambda _: _no_offerings()
    fresh = opened(emulator, clock=cloud._market._zones._clock)
    rows = fresh.offers(asking("p6-b300.48xlarge"))
    assert [(o.region, o.unavailable) for o in rows] == [("", "aws has no p6-b300.48xlarge in any region")]
    assert offer.instance_type == "p6-b300.48xlarge"


def _no_offerings() -> Any:
    from tests.emulators.aws import _xml

    return _xml("DescribeInstanceTypeOfferings", "<instanceTypeOfferingSet/>")


def test_c19_spot_and_on_demand_are_offers_of_their_own(emulator: AwsEmulator, cloud: AwsCloud) -> None:
    emulator.spot_usd = {"g4dn.xlarge": 0.2}
    for spot, markets in ((Spot.NEVER, {False}), (Spot.PREFER, {False, True}), (Spot.ONLY, {True})):
        query = asking("T4:1", spot=spot)
        offers = rank(available(match(cloud.offers(query), query)), spot=spot)
        assert {o.spot for o in offers} == markets
        usd = 0.2 if spot is not Spot.NEVER else 0.526
        assert offers[0].usd_per_hour == pytest.approx(usd + DISK + IPV4, abs=1e-6)
    assert emulator.calls["DescribeSpotPriceHistory"] > 0


def test_where_spot_prices_may_not_be_read_there_is_still_on_demand(
    emulator: AwsEmulator, cloud: AwsCloud
) -> None:
    emulator.denied = {"DescribeSpotPriceHistory"}
    offers = cloud.offers(asking("g4dn.xlarge", spot=Spot.PREFER))
    assert {o.spot for o in available(offers)} == {False}
    assert "aws names no spot price in us-east-1a" in {o.unavailable for o in offers}


def test_p5e_is_sold_as_capacity_blocks_only(cloud: AwsCloud) -> None:
    rows = [o for o in cloud.offers(asking("p5e.48xlarge")) if o.instance_type == "p5e.48xlarge"]
    assert rows
    assert not available(rows)
    assert "Capacity Blocks only" in str(rows[0].unavailable)


def test_cards_that_the_default_image_does_not_drive_are_told(cloud: AwsCloud) -> None:
    rows = cloud.offers(asking("V100:1"))
    assert rows
    assert all(
        "does not drive its V100" in str(o.unavailable) or "has no" in str(o.unavailable) for o in rows
    )


# Regions


@pytest.mark.parametrize(
    ("asked", "regions"),
    [
        (["us-west-2"], {"us-west-2"}),
        (["US-West-2 "], {"us-west-2"}),
        (["us-east"], {"us-east-1", "us-east-2"}),
        (["eu"], {"eu-west-1"}),
        (["Oregon", "europe"], {"us-west-2", "eu-west-1"}),
        (["US-TX-3", "us-east-1"], {"us-east-1"}),
    ],
)
def test_c25_a_region_is_resolved_once_for_every_call(
    cloud: AwsCloud, asked: list[str], regions: set[str]
) -> None:
    assert {o.region for o in available(cloud.offers(asking("T4:1", regions=asked)))} == regions


@pytest.mark.parametrize("asked", ["us-west-22", "europa", "US-TX-3"])
def test_c25_a_region_that_aws_has_not_got_is_an_early_error_that_names_those_it_has(
    emulator: AwsEmulator, cloud: AwsCloud, asked: str
) -> None:
    with pytest.raises(NotOffered, match="no region") as told:
        cloud.offers(asking("T4:1", regions=[asked]))
    assert "us-west-2" in str(told.value)
    assert emulator.calls["DescribeInstanceTypeOfferings"] == 0


def test_c25_a_region_without_image_is_no_offer(emulator: AwsEmulator, cloud: AwsCloud) -> None:
    emulator.imageless = {"us-east-1"}
    offers = cloud.offers(asking("T4:1"))
    assert "us-east-1" not in {o.region for o in available(offers)}
    assert {o.unavailable for o in offers if o.region == "us-east-1"} == {
        "aws has not got a Deep Learning AMI in us-east-1"
    }


def test_an_account_that_is_opened_for_some_regions_looks_nowhere_else(
    emulator: AwsEmulator, options: dict[str, Any]
) -> None:
    cloud = opened(emulator, regions=["us-east-2", "Oregon"], **options)
    assert {o.region for o in available(cloud.offers(asking("T4:1")))} == {"us-east-2", "us-west-2"}
    cloud.find("gf1-")
    assert emulator.calls["DescribeInstances"] == 2
    assert emulator.calls["DescribeRegions"] == 0
    with pytest.raises(NotOffered, match="rents in us-east-2, us-west-2 only"):
        cloud.offers(asking("T4:1", regions=["eu-west-1"]))


def test_a_region_that_fails_does_not_hide_the_others(emulator: AwsEmulator, cloud: AwsCloud) -> None:
    emulator.fault("DescribeInstanceTypeOfferings", refuse("UnauthorizedOperation", "not here", 403))
    offers = cloud.offers(asking("g4dn.xlarge"))
    assert len({o.region for o in available(offers)}) == 3
    (row,) = [o for o in offers if "not here" in str(o.unavailable)]
    assert row.region not in {o.region for o in available(offers)}


def test_where_every_region_fails_the_cloud_fails(emulator: AwsEmulator, cloud: AwsCloud) -> None:
    emulator.denied = {"DescribeInstanceTypeOfferings"}
    with pytest.raises(AuthenticationFailed):
        cloud.offers(asking("T4:1"))


# Images


def test_where_parameters_may_not_be_read_the_image_is_found_by_its_name(
    emulator: AwsEmulator, cloud: AwsCloud
) -> None:
    emulator.denied = {"GetParameter"}
    assert available(cloud.offers(asking("T4:1")))
    assert cloud._images.of("us-east-1", None).id == emulator.image("us-east-1")


def test_an_image_can_be_named_in_every_way(emulator: AwsEmulator, cloud: AwsCloud) -> None:
    from tests.emulators.aws import IMAGE_PARAMETER

    expected = emulator.image("us-east-1")
    for wanted in (expected, IMAGE_PARAMETER, "Deep Learning Base OSS*"):
        assert cloud._images.of("us-east-1", wanted).id == expected
    for missing in ("ami-0123456789abcdef0", "/aws/service/none", "no such image"):
        with pytest.raises(NotOffered, match="has not got the image"):
            cloud._images.of("us-east-1", missing)


# Prices


def test_prices_are_asked_for_once_a_day_and_remembered_on_disk(
    emulator: AwsEmulator, clock: FakeClock, options: dict[str, Any]
) -> None:
    query = asking("g4dn.xlarge")
    opened(emulator, **options).offers(query)
    asked = emulator.calls["GetProducts"]
    assert asked > 0
    opened(emulator, **options).offers(query)
    assert emulator.calls["GetProducts"] == asked
    clock.advance(86400)
    opened(emulator, **options).offers(query)
    assert emulator.calls["GetProducts"] == 2 * asked


def test_without_the_pricing_api_the_list_price_is_marked_as_such(
    emulator: AwsEmulator, cloud: AwsCloud
) -> None:
    emulator.denied = {"GetProducts"}
    (offer, *_) = available(cloud.offers(asking("g4dn.xlarge")))
    assert offer.usd_per_hour == pytest.approx(0.526 + DISK + IPV4, abs=1e-6)
    assert offer.price_note.startswith(f"list price of us-east-1 in {list_prices().as_of}")


def test_an_old_answer_is_better_than_the_list_and_says_its_day(
    emulator: AwsEmulator, clock: FakeClock, options: dict[str, Any]
) -> None:
    emulator.on_demand_usd = {"g4dn.xlarge": {"us-east-1": 0.6}}
    query = asking("g4dn.xlarge", regions=["us-east-1"])
    opened(emulator, **options).offers(query)
    day = f"{clock.now():%Y-%m-%d}"
    clock.advance(3 * 86400)
    emulator.always["GetProducts"] = instead(500, {})
    (offer, *_) = available(opened(emulator, **options).offers(query))
    assert offer.usd_per_hour == pytest.approx(0.6 + DISK + IPV4, abs=1e-6)
    assert offer.price_note == f"price of {day}"


@pytest.mark.parametrize("broken", ["{", "[]", '{"g4dn.xlarge": 1}'])
def test_a_broken_file_of_prices_is_written_anew(
    emulator: AwsEmulator, options: dict[str, Any], broken: str
) -> None:
    path = Path(options["cache"]) / "prices.json"
    path.parent.mkdir()
    path.write_text(broken)
    assert available(opened(emulator, **options).offers(asking("g4dn.xlarge")))
    assert "g4dn.xlarge" in json.loads(path.read_text())


def test_prices_in_an_unknown_way_are_not_believed(emulator: AwsEmulator, cloud: AwsCloud) -> None:
    emulator.always["GetProducts"] = instead(200, {"PriceList": ['{"product": {}}']})
    (offer, *_) = available(cloud.offers(asking("g4dn.xlarge")))
    assert offer.price_note.startswith("list price")


# What the table does not hold


def test_a_type_that_the_table_does_not_hold_is_described_by_aws(
    emulator: AwsEmulator, cloud: AwsCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_flows.clouds.aws.market.wanted_shapes", lambda _: [])
    emulator.on_demand_usd = {"g6.xlarge": {"us-east-1": 0.8}}
    rows = cloud.offers(asking("raw:g6.xlarge", regions=["us-east-1"]))
    (offer, *_) = available(rows)
    assert (offer.gpu, offer.gpu_count, offer.vram_gb, offer.vcpus) == ("L4", 1, 24, 4)


def test_slices_of_a_card_are_no_cards(cloud: AwsCloud) -> None:
    assert not available(cloud.offers(asking("raw:g6f.large", regions=["us-east-1"])))


def test_no_offer_where_only_processors_are_asked_for(emulator: AwsEmulator, cloud: AwsCloud) -> None:
    assert cloud.offers(asking("cpu")) == []
    assert not emulator.requests


def test_quotas_that_cannot_be_read_do_not_stop_anything(emulator: AwsEmulator, cloud: AwsCloud) -> None:
    emulator.always["GetServiceQuota"] = refuse_json("NoSuchResourceException", "none", 400)
    assert available(cloud.offers(asking("H100:8")))


def test_a_quota_has_to_hold_every_node(emulator: AwsEmulator, cloud: AwsCloud) -> None:
    emulator.default_quota = 300
    assert available(cloud.offers(asking("p5.48xlarge")))
    rows = cloud.offers(asking("p5.48xlarge", nodes=2))
    assert not available(rows)
    assert "allows 300 vCPUs on demand, and 2 x 192 are needed" in str(rows[0].unavailable)


def test_own_subnets_decide_on_the_zones(emulator: AwsEmulator, options: dict[str, Any]) -> None:
    from moto.backends import get_backend

    emulator.image("us-east-1")
    backend = get_backend("ec2")["123456789012"]["us-east-1"]
    subnet = next(
        each for each in backend.get_default_subnets().values() if each.availability_zone == "us-east-1b"
    )
    cloud = opened(emulator, subnet_ids=[subnet.id], **options)
    offers = cloud.offers(asking("g4dn.xlarge"))
    assert {o.zone for o in available(offers)} == {"us-east-1b"}
    lacking = {o.unavailable for o in offers if o.unavailable}
    assert "none of subnet_ids is in us-east-1a" in lacking
    query = replace(asking("g4dn.xlarge"), nodes=2)
    assert {o.details["nodes"] for o in cloud.offers(query)} == {2}
