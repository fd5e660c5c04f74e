"""``gpus`` and ``resolve``: tables, tab-separated text, and documents."""

from __future__ import annotations

from tests.cli.acme import Market
from tests.cli.conftest import Cli


def test_gpus_lists_the_catalog(cli: Cli) -> None:
    said = cli("gpus", "--format", "json")
    cards = {card["name"]: card for card in said.json["gpus"]}
    assert cards["H100"]["vram_gb"] == 80
    assert cards["MI300X"]["architecture"] == "rocm"
    rows = [line.split("\t") for line in cli("gpus").out.splitlines()]
    assert rows[0] == ["GPU", "GB", "generation", "forms", "clouds"]
    assert len(rows) == len(cards) + 1
    assert {len(row) for row in rows} == {5}


def test_gpus_of_one_cloud(cli: Cli) -> None:
    cards = cli("gpus", "--provider", "hotaisle", "--format", "json").json["gpus"]
    assert [card["name"] for card in cards] == ["MI300X"]
    said = cli("gpus", "--provider", "local")
    assert said.code == 0
    assert "rents no GPUs" in said.err
    assert cli("gpus", "--provider", "loca").code == 2


def test_resolve_ranks_what_clouds_offer(cli: Cli, market: Market) -> None:
    market.sells(31.5, 24.25)
    market.sells(10.0, unavailable="sold out")
    said = cli("resolve", "H100:8", "--clouds", "acme", "--format", "json")
    assert said.code == 0
    prices = [(offer["usd_per_hour"], offer["unavailable"]) for offer in said.json["offers"]]
    assert prices == [(24.25, None), (31.5, None), (10.0, "sold out")]
    rows = [line.split("\t") for line in cli("offers", "H100:8", "--provider", "acme").out.splitlines()]
    assert rows[0] == ["cloud", "region", "type", "GPUs", "GB", "$/h", ""]
    assert rows[1][:6] == ["acme", "r1", "h100x8", "8 x H100", "80", "24.25"]
    assert rows[3][6] == "sold out"


def test_resolve_without_a_request_shows_everything(cli: Cli, market: Market) -> None:
    market.sells(24.25)
    said = cli("resolve", "--format", "json")
    assert said.code == 0
    assert {offer["cloud"] for offer in said.json["offers"]} == {"local", "acme"}
    assert said.json["offers"][0]["usd_per_hour"] == 0


def test_a_cloud_that_fails_does_not_keep_the_others_from_answering(cli: Cli, market: Market) -> None:
    def silent(_: object) -> None:
        from gpu_flows.clouds.errors import AuthenticationFailed

        raise AuthenticationFailed("the key is wrong")

    market.cloud.offers = silent  # type: ignore[method-assign,assignment]
    said = cli("resolve", "cpu", "--clouds", "acme,local")
    assert said.code == 0
    assert "acme gave no offers: the key is wrong" in said.err
    said = cli("resolve", "cpu", "--clouds", "acme")
    assert said.code == 3
    assert "no cloud could say" in said.err


def test_more_cores_than_there_are_is_nothing_to_rent(cli: Cli) -> None:
    said = cli("resolve", "cpu:9999")
    assert said.code == 3
    assert "9999 are asked for" in said.out
