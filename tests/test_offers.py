"""Matching and ranking: what fits a query, why the rest does not, and in which order offers are tried."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_flows.errors import BadRequest
from gpu_flows.gpus import Catalog, GpuRequest, GpuVariant, load_catalog
from gpu_flows.offers import (
    Offer,
    OfferQuery,
    Spot,
    Strategy,
    explain_no_offer,
    match,
    rank,
    resolve_regions,
)


def offer(gpu: str | None = "H100-SXM", count: int = 8, usd: float = 10.0, **more: object) -> Offer:
    fields = {"cloud": "runpod", "instance_type": f"{gpu}x{count}"} | more
    return Offer(gpu=gpu, gpu_count=count, usd_per_hour=usd, **fields)  # type: ignore[arg-type]


def query(gpus: object = "H100:8", **more: object) -> OfferQuery:
    return OfferQuery(request=GpuRequest.parse(gpus), **more)  # type: ignore[arg-type]


def judged(one: Offer, asked: OfferQuery, **more: float) -> Offer:
    (found,) = match([one], asked, **more)
    return found


def test_an_offer_that_fits_is_told_its_place_in_the_request() -> None:
    found = judged(offer("A100-80GB-PCIe", 8, vram_gb=79.2), query("H100:8, A100:4"))
    assert (found.unavailable, found.alternative, found.used_count, found.gpu_count) == (None, 1, 4, 8)
    assert found.vram_gb == 80


def test_offers_of_other_cards_are_left_out() -> None:
    others = [offer("H200-SXM"), offer("A100-80GB"), offer("RTX 4090D"), offer(None, 0)]
    assert match(others, query("H100:8, RTX4090")) == []


def test_c21_a_typo_reaches_no_offer() -> None:
    with pytest.raises(BadRequest):
        match([offer("A100-80GB")], query("A10O:2"))


def test_a_whole_node_serves_a_smaller_count_if_its_whole_price_passes_the_cap() -> None:
    node = offer("A100-80GB-SXM", 8, 32.0, cloud="aws", instance_type="p4de.24xlarge")
    found = judged(node, query("A100:1"), price_cap=32.0)
    assert (found.unavailable, found.gpu_count, found.used_count) == (None, 8, 1)
    assert judged(node, query("A100:1")).unavailable is None
    assert judged(node, query("A100:1"), price_cap=31.99).unavailable == (
        "costs 32 USD/h, over the cap of 31.99 USD/h"
    )


def test_upgrades_only_under_a_cap() -> None:
    h200 = offer("H200-SXM", 8, 20.0)
    assert match([h200], query("H100:8")) == []
    assert judged(h200, query("H100:8"), price_cap=25).unavailable is None
    assert match([h200], query("H100!:8"), price_cap=25) == []
    assert judged(offer("B300"), query("B200+:8")).unavailable is None


def test_the_first_alternative_that_fits_is_the_one() -> None:
    asked = query("H100-SXM:8, H100:4, H100-NVL")
    assert judged(offer("H100-SXM", 8), asked).alternative == 0
    assert judged(offer("H100-SXM", 4), asked).alternative == 1
    assert judged(offer("H100-NVL", 2), asked).alternative == 2
    too_small = judged(offer("H100-SXM", 2), asked)
    assert (too_small.alternative, too_small.unavailable) == (0, "has 2 GPUs, 8 are asked for")


@pytest.mark.parametrize(
    ("one", "asked", "reason"),
    [
        (offer(count=4), query(), "has 4 GPUs, 8 are asked for"),
        (offer(), query(min_vram_gb=94), "has 80 GB a GPU, at least 94 are asked for"),
        (offer(region="eu-1"), query(regions=["us-1"]), "is in eu-1, not in us-1"),
        (offer(), query(regions=["us-1"]), "is in no region, not in us-1"),
        (offer(spot=True), query(), "can be interrupted, and spot is never"),
        (offer(), query(spot=Spot.ONLY), "cannot be interrupted, and spot is only"),
        (offer(max_duration_s=86400), query(), "lives 24 h at most, 25 h are needed"),
        (offer(unavailable="sold out", usd=99), query(), "sold out"),
        (offer(stock=0), query(), "none in stock"),
        (offer(usd=math.nan), query(), "its price nan is none"),
        (offer(usd=-1), query(), "its price -1 is none"),
        (offer(usd=12.001), query(), "costs 12.001 USD/h, over the cap of 12 USD/h"),
        (offer(None, 0, 0, vcpus=2), query("cpu:4"), "has 2 cores, 4 are asked for"),
    ],
)
def test_what_does_not_fit_says_why(one: Offer, asked: OfferQuery, reason: str) -> None:
    found = judged(one, asked, price_cap=12, needed_s=25 * 3600)
    assert found.unavailable == reason
    assert judged(found, asked, price_cap=12, needed_s=25 * 3600) == found


@pytest.mark.parametrize(
    ("one", "asked"),
    [
        (offer(spot=True), query(spot=Spot.PREFER)),
        (offer(spot=True), query(spot=Spot.ONLY)),
        (offer(region="US-East-1 "), query(regions=["eu-1", " us-east-1"])),
        (offer(max_duration_s=90000), query()),
        (offer(stock=None), query()),
        (offer(usd=12), query()),
        (offer(None, 0, 0, vcpus=4), query("cpu:4")),
        (offer(None, 0, 0), query("cpu:4")),
        (offer("RTX 4080", 1), query("raw:RTX_4080")),
        (offer("RTX4090", 1, cloud="vastai", instance_type="123"), query("raw:RTX_4090")),
        (offer("H100-SXM", 8, cloud="aws", instance_type="p5.48xlarge"), query("p5.48xlarge:2")),
        (offer("A100", 8, vram_gb=80), query("A100-80GB:8")),
    ],
)
def test_what_fits(one: Offer, asked: OfferQuery) -> None:
    found = judged(one, asked, price_cap=12, needed_s=25 * 3600)
    assert found.unavailable is None
    assert found.used_count == (0 if asked.request.is_cpu else asked.request.alternatives[0].count)


def test_names_of_a_cloud_reach_only_what_they_name() -> None:
    assert match([offer("H100-SXM", 8, instance_type="p5.48xlarge")], query("p5.48xlarge")) == []
    assert match([offer("H100-SXM", 8, cloud="aws", instance_type="p5.4xlarge")], query("p5.48xlarge")) == []
    assert match([offer("RTX 4080 SUPER", 1), offer(None, 0)], query("raw:RTX 4080")) == []


def test_c23_nominal_memory_decides_and_an_unknown_card_has_a_tolerance() -> None:
    offers = [
        offer("RTX4090", 1, vram_gb=24217 / 1024),
        offer("L4", 1, vram_gb=22.5),
        offer("RTX3090", 1, vram_gb=24),
        offer("RTX-A5000", 1, vram_gb=23028 / 1024),
        offer("RTX 4080", 1, vram_gb=16376 / 1024),
        offer("Mystery 24", 1, vram_gb=22.4),
        offer("Mystery 22", 1, vram_gb=22.2),
    ]
    request = query("ANY, raw:RTX_4080, raw:Mystery_24, raw:Mystery_22", min_vram_gb=24)
    fitting = {found.gpu for found in match(offers, request) if found.unavailable is None}
    assert fitting == {"RTX4090", "L4", "RTX3090", "RTX-A5000", "Mystery 24"}


def test_c19_the_dear_tier_does_not_pass_the_cap_of_the_cheap_one() -> None:
    community = offer("RTX-A6000", 2, 0.98, details={"tier": "COMMUNITY"})
    secure = offer("RTX-A6000", 2, 1.52, details={"tier": "SECURE"})
    cheap, dear = rank(match([secure, community], query("A6000:2"), price_cap=1.00))
    assert (cheap.details["tier"], cheap.unavailable) == ("COMMUNITY", None)
    assert (dear.details["tier"], dear.unavailable) == (
        "SECURE",
        "costs 1.52 USD/h, over the cap of 1 USD/h",
    )


@pytest.mark.parametrize("cap", [-1.0, math.nan, math.inf])
def test_a_cap_has_to_be_a_price(cap: float) -> None:
    with pytest.raises(BadRequest, match="is no price"):
        match([], query(), price_cap=cap)


def names(offers: list[Offer]) -> list[str]:
    return [each.instance_type for each in offers]


def test_order() -> None:
    offers = [
        offer(usd=9, instance_type="h100", alternative=0),
        offer(usd=8, instance_type="h100 sold out", alternative=0, unavailable="sold out"),
        offer(usd=12, instance_type="h100 spot", alternative=0, spot=True),
        offer(usd=5, instance_type="a100", alternative=1),
        offer(usd=7, instance_type="a100 spot", alternative=1, spot=True),
    ]
    assert names(rank(offers)) == ["h100", "h100 spot", "a100", "a100 spot", "h100 sold out"]
    assert names(rank(offers, spot=Spot.PREFER)) == [
        *("h100 spot", "h100", "a100 spot", "a100", "h100 sold out"),
    ]
    assert names(rank(offers, Strategy.CHEAPEST)) == [
        *("a100", "a100 spot", "h100", "h100 spot", "h100 sold out"),
    ]
    assert names(rank(offers, Strategy.CHEAPEST, spot=Spot.PREFER)) == [
        *("a100 spot", "h100 spot", "a100", "h100", "h100 sold out"),
    ]


def test_ties_go_to_the_smaller_box_and_then_to_the_users_order_of_clouds() -> None:
    offers = [
        offer(count=8, cloud="aws", instance_type="large"),
        offer(count=4, cloud="aws", instance_type="aws"),
        offer(count=4, cloud="runpod", instance_type="runpod"),
    ]
    assert names(rank(offers)) == ["aws", "runpod", "large"]
    assert names(rank(offers, clouds=["runpod", "aws"])) == ["runpod", "aws", "large"]
    assert names(rank(offers, clouds=["runpod@default", "aws"])) == ["runpod", "aws", "large"]


def test_why_there_is_none() -> None:
    asked = query("H100:8", regions=["us-1"], min_vram_gb=80)
    offers = [
        offer(count=4, usd=8.5, region="us-1"),
        offer(region="eu-1"),
        offer(region="us-1", spot=True),
        offer(region="us-1", max_duration_s=3600),
        offer(region="us-1", unavailable="LOW stock"),
        offer(region="us-1", usd=24.5),
        offer(region="us-1", usd=20.25, cloud="vastai"),
    ]
    limits = {"price_cap": 20, "needed_s": 7200}
    text = explain_no_offer(match(offers, asked, **limits), asked, **limits)
    assert text == (
        "no offer fits H100:8: 7 of that kind were found, 1 too small (the largest: 4 x H100-SXM at runpod "
        "us-1 for 8.5 USD/h); 1 in other regions (eu-1); 1 that can be interrupted (spot is never); 1 that "
        "cannot live as long as is needed; 1 not to be had now (such as: LOW stock); 2 over the price cap of "
        "20 USD/h, the cheapest 8 x H100-SXM at vastai us-1 for 20.25 USD/h"
    )
    assert "\n" not in text
    assert explain_no_offer([], asked) == (
        "no offer fits H100:8: none of the clouds that were asked rents it"
    )
    small = query("T4", min_vram_gb=24)
    assert "(the most is 16 GB a GPU)" in explain_no_offer(match([offer("T4", 1)], small), small)


def test_c25_regions_are_resolved_once_or_refused_with_those_that_exist() -> None:
    known = ["us-west-2", "us-west-1", "eu-central-1"]
    assert resolve_regions(["US-West-2 ", "us-west-2"], known) == ("us-west-2",)
    assert resolve_regions(["eu", "us-west-1"], known, aliases={"EU": ["eu-central-1"]}) == (
        "eu-central-1",
        "us-west-1",
    )
    assert resolve_regions([], known) == ()
    for wrong in ("us-west", "eu", "us-west-22", "", "mars"):
        with pytest.raises(BadRequest, match="eu-central-1, us-west-1, us-west-2"):
            resolve_regions([wrong], known)
    with pytest.raises(BadRequest, match="did you mean us-west-2"):
        resolve_regions(["us-west-22"], known)


# Properties.

CARDS = ["H100-SXM", "H100-PCIe", "H200-SXM", "A100-80GB", "A100-40GB-SXM", "T4", "RTX 4080", None]
prices = st.sampled_from([0.5, 1.0, 2.0, 10.0, math.nan, math.inf]) | st.floats(0, 40)
offers_drawn = st.lists(
    st.builds(
        Offer,
        cloud=st.sampled_from(["aws", "runpod", "vastai"]),
        region=st.sampled_from(["", "us-1", "eu-1"]),
        zone=st.sampled_from([None, "a"]),
        instance_type=st.sampled_from(["x", "y", "p5.48xlarge"]),
        gpu=st.sampled_from(CARDS),
        gpu_count=st.integers(0, 8),
        vram_gb=st.sampled_from([0, 16, 80]),
        vcpus=st.sampled_from([None, 1, 8]),
        usd_per_hour=prices,
        spot=st.booleans(),
        stock=st.sampled_from([None, 0, 3]),
        max_duration_s=st.sampled_from([None, 3600.0]),
        unavailable=st.sampled_from([None, "sold out"]),
    ),
    max_size=12,
)
queries = st.builds(
    OfferQuery,
    request=st.lists(
        st.sampled_from(
            ["H100:4", "H100!", "H100+:2", "A100:8", "ANY:2", "cpu:2", "raw:RTX_4080", "p5.48xlarge"]
        ),
        min_size=1,
        max_size=3,
    ).map(GpuRequest.parse),
    regions=st.sampled_from([(), ("us-1",), ("EU-1", "us-1")]),
    min_vram_gb=st.sampled_from([None, 17, 80]),
    spot=st.sampled_from(Spot),
)
caps = st.none() | st.floats(0, 40)


def identity(one: Offer) -> str:
    return repr(
        (one.cloud, one.region, one.zone, one.instance_type, one.gpu_count, one.usd_per_hour, one.spot)
    )


@given(offers_drawn, queries, caps, st.sampled_from(Strategy), st.randoms(use_true_random=False))
def test_what_is_available_meets_the_query_and_the_order_is_a_function_of_the_set(
    offers: list[Offer], asked: OfferQuery, cap: float | None, strategy: Strategy, random: object
) -> None:
    found = match(offers, asked, price_cap=cap, needed_s=7200)
    assert match(found, asked, price_cap=cap, needed_s=7200) == found or any(
        each.usd_per_hour != each.usd_per_hour for each in found
    )
    for each in found:
        alternative = asked.request.alternatives[each.alternative]
        assert alternative.kind != "model" or alternative.accepts(each.gpu, price_capped=cap is not None)
        if each.unavailable is None:
            assert cap is None or each.usd_per_hour <= cap
            assert 0 <= each.usd_per_hour < math.inf
            assert alternative.is_cpu or each.gpu_count >= each.used_count == alternative.count
            assert each.spot or asked.spot is not Spot.ONLY
            assert not each.spot or asked.spot is not Spot.NEVER
            assert each.max_duration_s is None
            assert each.stock != 0
    ranked = rank(found, strategy, spot=asked.spot)
    assert sorted(map(id, ranked)) == sorted(map(id, found))
    shuffled = list(found)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert list(map(identity, rank(shuffled, strategy, spot=asked.spot))) == list(map(identity, ranked))
    states = [each.unavailable is not None for each in ranked]
    assert states == sorted(states)
    if all(states):
        assert explain_no_offer(found, asked, price_cap=cap, needed_s=7200).startswith("no offer fits")


def test_each_card_of_a_large_market_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [variant.name for variant in load_catalog().vocabulary.variants.values()]
    market = [
        offer(cards[i % len(cards)], 1 + i % 8, 0.1 + i % 397 / 10, instance_type=str(i), region=f"r{i % 30}")
        for i in range(3_000)
    ]
    lookups: list[str] = []
    look_up = Catalog.variant

    def counted(catalog: Catalog, name: str) -> GpuVariant | None:
        lookups.append(name)
        return look_up(catalog, name)

    monkeypatch.setattr(Catalog, "variant", counted)
    asked = query("ANY, H100:8", regions=[f"r{i}" for i in range(20)], min_vram_gb=24)
    assert len(rank(match(market, asked, price_cap=30, needed_s=3600))) == 3_000
    assert len(lookups) <= len(cards), "what depends on the card alone is worked out once"


def test_offers_still_travel_as_json() -> None:
    found = judged(offer(), query())
    assert Offer.from_json(found.to_json()) == found
    assert dataclasses.replace(found) == found
