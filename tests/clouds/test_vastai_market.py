"""The market of Vast.ai: what is searched for, page by page, and what an ask is to us."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from gpu_flows.clouds.base import BoxState
from gpu_flows.clouds.errors import NotOffered, RateLimited, RequestRefused, Scope, UnexpectedAnswer
from gpu_flows.clouds.vastai import VastaiCloud
from gpu_flows.clouds.vastai.market import PAGE_ROWS, region_of
from gpu_flows.gpus.request import GpuRequest
from gpu_flows.leases.deadman import HALT, boot_script
from gpu_flows.offers import Offer, OfferQuery, Spot, Strategy, match, rank
from tests.clouds.test_vastai_failures import KEY, spec
from tests.emulators.clock import FakeClock
from tests.emulators.http import EMPTY, HTML, instead
from tests.emulators.vastai import HOURS_A_MONTH, VastaiEmulator, ask


@pytest.fixture
def emulator() -> Iterator[VastaiEmulator]:
    with VastaiEmulator(api_key=KEY) as running:
        yield running


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def cloud(emulator: VastaiEmulator, clock: FakeClock) -> VastaiCloud:
    return VastaiCloud(api_key=KEY, base_url=emulator.url, clock=clock)


def query(gpus: str | list[str], **more: Any) -> OfferQuery:
    return OfferQuery(request=GpuRequest.parse(gpus), **more)


def asked(emulator: VastaiEmulator) -> dict[str, Any]:
    """Return the last search."""
    return next(dict(r.body) for r in reversed(emulator.requests) if r.path == "/api/v0/bundles/")


def available(cloud: VastaiCloud, wanted: OfferQuery) -> list[Offer]:
    return [offer for offer in match(cloud.offers(wanted), wanted) if offer.unavailable is None]


# What is searched for


def test_a_search_is_an_object_with_names_as_vast_writes_them(
    cloud: VastaiCloud, emulator: VastaiEmulator
) -> None:
    cloud.offers(query("RTX_4090:2", disk_gb=100))
    body = asked(emulator)
    assert body["gpu_name"] == {"in": ["RTX 4090"]}
    assert body["num_gpus"] == {"gte": 2}
    assert body["type"] == "on-demand"
    assert body["allocated_storage"] == 100
    assert body["disk_space"] == {"gte": 100}
    assert body["rentable"] == {"eq": True}
    assert body["rented"] == {"eq": False}
    assert body["verified"] == {"eq": True}
    assert body["direct_port_count"] == {"gte": 1}
    assert body["reliability"] == {"gte": 0.95}
    assert body["cpu_arch"] == {"in": ["amd64"]}
    assert body["order"][0] == ["dph_total", "asc"]


def test_the_standards_are_options(emulator: VastaiEmulator) -> None:
    options = json.loads(json.dumps({"reliability": 0.5, "verified": False}))
    cloud = VastaiCloud(api_key=KEY, base_url=emulator.url, **options)
    emulator.asks = [ask(1, reliability=0.6, reliability2=0.6, verification="unverified", verified=False)]
    assert len(available(cloud, query("H100:8"))) == 1
    assert "verified" not in asked(emulator)


@pytest.mark.parametrize(
    ("gpus", "min_vram_gb", "names", "reported"),
    [
        ("H100", None, ["H100 SXM"], 81559),
        ("RTX4090", None, ["RTX 4090"], 24217),
        ("RTX5090", None, ["RTX 5090"], 32607),
        ("L40S", 48, ["L40S"], 46068),
        ("A40", 48, ["A40"], 46068),
        ("RTX-A6000", 48, ["RTX A6000"], 49140),
        ("H200", 141, ["H200"], 143771),
        ("L4", 24, ["L4"], 22888),
        ("T4", 16, ["Tesla T4"], 15109),
        ("RTX-PRO-6000", 96, ["RTX PRO 6000 WS"], 97887),
        ("A100-80GB", 80, ["A100 SXM4"], 81920),
        ("GH200", 96, ["GH200 SXM"], 97871),
    ],
)
def test_c23_no_card_is_lost_to_a_filter_by_nominal_memory(
    cloud: VastaiCloud,
    emulator: VastaiEmulator,
    gpus: str,
    min_vram_gb: float | None,
    names: list[str],
    reported: int,
) -> None:
    """Every card reports less than its nominal memory; the server filters with slack, the client decides."""
    arch = "arm64" if gpus == "GH200" else "amd64"
    emulator.asks = [ask(1, names[0], 1, reported, cpu_arch=arch)]
    wanted = query(gpus, min_vram_gb=min_vram_gb)
    (offer,) = available(cloud, wanted)
    assert asked(emulator)["gpu_ram"]["gte"] <= 0.93 * (min_vram_gb or 0 or offer.vram_gb) * 1024
    assert offer.vram_gb == min_vram_gb or min_vram_gb is None


def test_c23_the_client_decides_on_the_nominal_size(cloud: VastaiCloud, emulator: VastaiEmulator) -> None:
    emulator.asks = [
        ask(1, "RTX 4090", 1, 24217),
        ask(2, "RTX 3090", 1, 24576),
        ask(3, "RTX A5000", 1, 23028),
        ask(4, "L4", 1, 22888),
        ask(5, "RTX A4000", 1, 16376),
    ]
    wanted = query("ANY", min_vram_gb=24)
    assert {offer.gpu for offer in available(cloud, wanted)} == {"RTX4090", "RTX3090", "RTX-A5000", "L4"}


def test_a100_of_40_and_of_80_gb_differ_by_memory_only(cloud: VastaiCloud, emulator: VastaiEmulator) -> None:
    emulator.asks = [
        ask(1, "A100 SXM4", 1, 40960),
        ask(2, "A100 SXM4", 1, 81920),
        ask(3, "A100 PCIE", 1, 40960),
    ]

    def cards(gpus: str) -> list[str | None]:
        return sorted(str(offer.gpu) for offer in available(cloud, query(gpus)))

    assert cards("A100-80GB") == ["A100-80GB-SXM"]
    assert cards("A100-40GB!") == ["A100-40GB-PCIe", "A100-40GB-SXM"]
    assert cards("A100") == ["A100-40GB-PCIe", "A100-40GB-SXM", "A100-80GB-SXM"]
    assert asked(emulator)["gpu_ram"]["gte"] <= 0.93 * 40 * 1024


def test_a_4090d_is_no_4090_and_a_slice_is_no_card(cloud: VastaiCloud, emulator: VastaiEmulator) -> None:
    emulator.asks = [
        ask(1, "RTX 4090D", 1, 24217),
        ask(2, "RTX 4090", 1, 12000),
        ask(3, "RTX 4090", 1, 24217),
    ]
    assert [offer.machine for offer in available(cloud, query("RTX4090"))] == ["40003"]
    # A server that ignores the filters changes nothing.
    emulator.fault("search", instead(200, {"offers": emulator_rows(emulator)}))
    assert [offer.machine for offer in available(cloud, query("RTX4090"))] == ["40003"]


def emulator_rows(emulator: VastaiEmulator) -> list[dict[str, Any]]:
    return [{**each, "dph_total": each["dph_base"]} for each in emulator.asks]


def test_a_raw_name_goes_to_the_market_with_blanks(cloud: VastaiCloud, emulator: VastaiEmulator) -> None:
    emulator.asks = [ask(1, "RTX 4090D", 1, 24217)]
    (offer,) = available(cloud, query("raw:RTX_4090D"))
    assert asked(emulator)["gpu_name"] == {"in": ["RTX 4090D"]}
    assert (offer.gpu, offer.vram_gb) == ("RTX 4090D", pytest.approx(23.65, abs=0.01))


def test_filters_that_the_server_ignores_are_kept_by_the_client(
    cloud: VastaiCloud, emulator: VastaiEmulator
) -> None:
    emulator.asks = [
        ask(1, rentable=False),
        ask(2, rented=True),
        ask(3, reliability2=0.4),
        ask(4, verification="deverified"),
        ask(5, direct_port_count=0),
        ask(6, disk_space=10.0),
        ask(7, count=4),
        ask(8, geolocation="Quebec, CA"),
        ask(9, cpu_arch="arm64"),
        ask(10, duration=3600.0),
    ]
    emulator.fault("search", instead(200, {"offers": emulator_rows(emulator)}))
    wanted = query("H100:8", regions=["US"])
    judged = match(cloud.offers(wanted), wanted, needed_s=7200)
    assert len(judged) == 10
    assert all(offer.unavailable for offer in judged)


# Pages


def test_every_page_by_price_and_no_ask_twice(cloud: VastaiCloud, emulator: VastaiEmulator) -> None:
    emulator.asks = [ask(n, dph_base=10 + n / 100) for n in range(1, 151)]
    offers = available(cloud, query("H100:8"))
    assert sorted(offer.details["ask"] for offer in offers) == list(range(1, 151))
    assert emulator.calls["search"] == 3


def test_pages_of_one_price_end(cloud: VastaiCloud, emulator: VastaiEmulator) -> None:
    emulator.asks = [ask(n, dph_base=10.0) for n in range(1, 101)] + [ask(200, dph_base=11.0)]
    offers = available(cloud, query("H100:8"))
    # Beyond a page of one price the rest of that price is not seen; what is dearer is.
    assert len(offers) == PAGE_ROWS + 1
    assert 200 in {offer.details["ask"] for offer in offers}


def test_a_cheap_card_does_not_hide_eight_dear_ones(cloud: VastaiCloud, emulator: VastaiEmulator) -> None:
    emulator.asks = [ask(n, "RTX 4090", 1, 24217, dph_base=0.3) for n in range(1, 600)] + [ask(999)]
    wanted = query(["H100:8", "RTX4090"])
    best = rank(available(cloud, wanted), Strategy.ORDERED)[0]
    assert best.details["ask"] == 999
    assert emulator.calls["search"] <= 8


def test_ten_searches_a_minute_are_not_passed(
    cloud: VastaiCloud, emulator: VastaiEmulator, clock: FakeClock
) -> None:
    emulator.searches_a_minute = 10
    began = clock.monotonic()
    for _ in range(10):
        cloud.offers(query("H100:8"))
    assert clock.monotonic() == began
    emulator.searches_a_minute = 20
    cloud.offers(query("H100:8"))
    assert clock.monotonic() == pytest.approx(began + 60)


def test_a_429_of_a_search_is_asked_again_and_then_said(cloud: VastaiCloud, emulator: VastaiEmulator) -> None:
    emulator.fault("search", instead(429, {"detail": "too frequent"}))
    assert available(cloud, query("H100:8"))
    emulator.fault("search", *[instead(429, {"detail": "too frequent"})] * 3)
    with pytest.raises(RateLimited):
        cloud.offers(query("H100:8"))


@pytest.mark.parametrize(
    "fault",
    [
        EMPTY,
        HTML,
        instead(200, {}),
        instead(200, {"offers": {"id": 1}}),
        instead(200, {"success": False, "offers": []}),
        instead(200, {"offers": ["x"]}),
        instead(200, {"offers": [{"id": 1}, {"id": "x"}]}),
        instead(410, {"error": "deprecated_endpoint"}),
    ],
)
def test_c05_what_is_no_market_is_unknown_and_never_empty(
    cloud: VastaiCloud, emulator: VastaiEmulator, fault: Any
) -> None:
    emulator.fault("search", fault)
    with pytest.raises(UnexpectedAnswer):
        cloud.offers(query("H100:8"))


def test_a_bad_row_among_good_ones_is_left_out(
    cloud: VastaiCloud, emulator: VastaiEmulator, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [*emulator_rows(emulator), {"id": 5, "gpu_name": "H100 SXM"}]
    emulator.fault("search", instead(200, {"offers": rows}))
    assert len(cloud.offers(query("H100:8"))) == 1
    assert "1 of 2 asks" in caplog.text


# What an ask is to us


def test_the_price_is_of_the_whole_box_with_the_disk(cloud: VastaiCloud, emulator: VastaiEmulator) -> None:
    (small,) = available(cloud, query("H100:8"))
    (large,) = available(cloud, query("H100:8", disk_gb=1000))
    assert small.usd_per_hour == pytest.approx(16 + 0.15 * 40 / HOURS_A_MONTH, abs=1e-5)
    assert large.usd_per_hour == pytest.approx(16 + 0.15 * 1000 / HOURS_A_MONTH, abs=1e-5)
    box = cloud.create(large, spec())
    assert cloud.describe(box).usd_per_hour == pytest.approx(large.usd_per_hour)
    assert emulator.book[box.id].data["disk_space"] == 1000


def test_an_offer_says_where_and_which_machine(cloud: VastaiCloud, emulator: VastaiEmulator) -> None:
    (offer,) = available(cloud, query("H100:8"))
    assert (offer.region, offer.zone, offer.machine) == ("US", "California, US", "41001")
    assert (offer.gpu, offer.gpu_count, offer.vram_gb) == ("H100-SXM", 8, 80)
    assert (offer.instance_type, offer.vcpus, offer.stock) == ("8x H100 SXM", 128, 1)
    assert offer.max_duration_s == 2_592_000


@pytest.mark.parametrize(
    ("regions", "sent", "fits"),
    [
        (["US"], ["US"], True),
        (["us", "CA"], ["US", "CA"], True),
        (["California, US"], ["US"], True),
        (["california,us "], ["US"], True),
        (["Texas, US"], ["US"], False),
        (["DE"], ["DE"], False),
        (["us-west"], None, False),
    ],
)
def test_c25_regions_are_countries_or_whole_places(
    cloud: VastaiCloud, emulator: VastaiEmulator, regions: list[str], sent: list[str] | None, fits: bool
) -> None:
    wanted = query("H100:8", regions=regions)
    assert bool(available(cloud, wanted)) is fits
    assert asked(emulator).get("geolocation", {}).get("in") == sent


def test_a_place_that_is_not_told_is_no_region() -> None:
    assert region_of(None) == ("", None)
    assert region_of("Sweden") == ("Sweden", "Sweden")


def test_what_nobody_offers_is_one_row_with_a_reason(cloud: VastaiCloud, emulator: VastaiEmulator) -> None:
    wanted = query(["B200:8", "A100-80GB-PCIe:4", "H100:8"])
    offers = match(cloud.offers(wanted), wanted)
    assert [(offer.gpu, offer.gpu_count, offer.unavailable is None) for offer in offers] == [
        ("B200", 8, False),
        ("A100-80GB-PCIe", 4, False),
        ("H100-SXM", 8, True),
    ]
    assert "nobody" in (offers[0].unavailable or "")


def test_the_cpu_and_instance_types_of_other_clouds_are_not_searched_for(
    cloud: VastaiCloud, emulator: VastaiEmulator
) -> None:
    assert cloud.offers(query(["cpu:4", "p5.48xlarge"])) == []
    assert emulator.calls["search"] == 0


# Spot


def test_a_bid_is_a_little_over_the_least(cloud: VastaiCloud, emulator: VastaiEmulator) -> None:
    (offer,) = available(cloud, query("H100:8", spot=Spot.ONLY))
    assert asked(emulator)["type"] == "bid"
    assert offer.spot
    assert offer.details["bid"] == pytest.approx(0.9 * 8 * 1.1)
    assert offer.usd_per_hour == pytest.approx(0.9 * 8 * 1.1 + 0.15 * 40 / HOURS_A_MONTH, abs=1e-4)
    box = cloud.create(offer, spec())
    body = emulator.requests[-1].body
    assert body["price"] == offer.details["bid"]
    now = cloud.describe(box)
    assert now.spot
    assert now.usd_per_hour == pytest.approx(offer.usd_per_hour, abs=1e-4)


def test_spot_preferred_asks_both_markets(cloud: VastaiCloud, emulator: VastaiEmulator) -> None:
    wanted = query("H100:8", spot=Spot.PREFER)
    assert [offer.spot for offer in rank(available(cloud, wanted), spot=Spot.PREFER)] == [True, False]
    assert emulator.calls["search"] == 2
    assert "price" not in (emulator.requests[-1].body or {})


def test_an_offer_of_a_bid_without_one_is_not_rented(cloud: VastaiCloud, emulator: VastaiEmulator) -> None:
    offer = replace(available(cloud, query("H100:8"))[0], spot=True)
    with pytest.raises(RequestRefused):
        cloud.create(offer, spec())
    assert emulator.calls["create"] == 0


# The create call


def test_the_create_call_carries_all_of_it(cloud: VastaiCloud, emulator: VastaiEmulator) -> None:
    (offer,) = available(cloud, query("H100:8"))
    mine = spec(image="ghcr.io/me/train:1", disk_gb=200, env={"TZ": "UTC"})
    mine = replace(
        mine,
        boot_script=boot_script(
            mine.deadline, cloud.self_destruct(mine) or "", length_s=3600, last_resort=HALT
        ),
    )
    box = cloud.create(offer, mine)
    body = emulator.requests[-1].body
    assert emulator.requests[-1].path == "/api/v0/asks/1001/"
    assert body["label"] == mine.name
    assert body["cancel_unavail"] is True
    assert body["runtype"] == "ssh_direct"
    assert (body["image"], body["disk"]) == ("ghcr.io/me/train:1", 200)
    assert body["env"] == {"TZ": "UTC", "-p 22:22": "1"}
    assert "price" not in body
    assert mine.ssh_public_key in body["onstart"]
    assert mine.boot_script in body["onstart"]
    assert ".no_auto_tmux" in body["onstart"]
    assert box.state is BoxState.STARTING
    assert "instance-key" not in repr(box)


def test_c49_the_dead_man_fits_into_onstart_with_room_to_spare(cloud: VastaiCloud) -> None:
    mine = spec()
    from gpu_flows.clouds.vastai.boot import LONGEST_ONSTART, onstart

    text = boot_script(mine.deadline, cloud.self_destruct(mine) or "", length_s=10**7, last_resort=HALT)
    assert len(onstart(mine.ssh_public_key, text)) < LONGEST_ONSTART - 300


def test_c49_a_boot_script_that_is_too_long_is_refused_here(
    cloud: VastaiCloud, emulator: VastaiEmulator
) -> None:
    (offer,) = available(cloud, query("H100:8"))
    with pytest.raises(NotOffered, match="4096") as refusal:
        cloud.create(offer, spec(boot_script="#" * 4000))
    assert refusal.value.scope is Scope.CLOUD
    assert not refusal.value.ambiguous
    assert emulator.calls["create"] == 0


@pytest.mark.parametrize(
    "key", ["", "no key", "ssh-ed25519 AAAA\nssh-ed25519 BBBB", "ssh-ed25519 A'; reboot '"]
)
def test_what_is_no_public_key_is_refused_here(
    cloud: VastaiCloud, emulator: VastaiEmulator, key: str
) -> None:
    (offer,) = available(cloud, query("H100:8"))
    with pytest.raises(RequestRefused):
        cloud.create(offer, spec(ssh_public_key=key))
    assert emulator.calls["create"] == 0


def test_an_offer_of_another_cloud_is_not_rented(cloud: VastaiCloud, emulator: VastaiEmulator) -> None:
    (offer,) = available(cloud, query("H100:8"))
    for wrong in (
        replace(offer, cloud="runpod"),
        replace(offer, details={}),
        replace(offer, details={"ask": "1/x"}),
    ):
        with pytest.raises(RequestRefused):
            cloud.create(wrong, spec())
    assert emulator.calls["create"] == 0
