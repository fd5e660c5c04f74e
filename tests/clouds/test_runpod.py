"""RunPod: the suite of every cloud, and what is RunPod's own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpu_flows.clouds import open_cloud
from gpu_flows.clouds.base import Box, BoxSpec, BoxState, Cloud
from gpu_flows.clouds.errors import AuthenticationFailed, RequestRefused, Scope
from gpu_flows.clouds.runpod import RunpodCloud
from gpu_flows.gpus.request import GpuRequest
from gpu_flows.offers import Offer, OfferQuery, match
from tests.clouds.contract import CloudContract, box_name, until
from tests.clouds.ssh_client import PUBLIC_KEY, run
from tests.emulators.http import Row, instead
from tests.emulators.runpod import KEY, Card, RunpodEmulator


@pytest.fixture
def emulator(tmp_path: Path) -> Iterator[RunpodEmulator]:
    with RunpodEmulator(tmp_path / "pods") as emulator:
        yield emulator
        until(lambda: not emulator.live(), f"nothing bills: {emulator.live()}")


@pytest.fixture
def cloud(emulator: RunpodEmulator) -> Cloud:
    return open_cloud("runpod", api_key=KEY, base_url=emulator.url)


class TestRunpodCloud(CloudContract):
    request_text = "A6000:2"
    unknown_id = "abcdef0123"
    public_key = PUBLIC_KEY
    secrets = (KEY,)

    @pytest.fixture(autouse=True)
    def _emulator(self, emulator: RunpodEmulator) -> None:
        self.emulator = emulator

    @pytest.fixture
    def cloud(self, emulator: RunpodEmulator) -> Cloud:
        return open_cloud("runpod", api_key=KEY, base_url=emulator.url)

    def reopen(self, cloud: Cloud) -> Cloud:
        return open_cloud("runpod", api_key=KEY, base_url=self.emulator.url)

    @contextmanager
    def broken_listing(self, cloud: Cloud) -> Iterator[None]:
        self.emulator.fault("list", instead(200, {"errors": [{"message": "deprecated_endpoint"}]}))
        yield

    def foreign_box(self, cloud: Cloud, name: str) -> str | None:
        return self.emulator.stranger(name).id

    def foreign_box_lives(self, cloud: Cloud, box_id: str) -> bool:
        return self.emulator.book[box_id].ended_at is None

    def drive(self, cloud: Cloud, box: Box, state: BoxState) -> bool:
        statuses = {
            BoxState.STARTING: "PROVISIONING",
            BoxState.RUNNING: "RUNNING",
            BoxState.STOPPED: "EXITED",
            BoxState.FAILED: "ERROR",
        }
        if state is BoxState.RUNNING:
            self.until_running(cloud, box)
        if state in statuses:
            self.row(box).state = statuses[state]
        return state in statuses

    def unrentable(self, offer: Offer, spec: BoxSpec) -> tuple[Offer, BoxSpec]:
        details = {**offer.details, "gpu": "no such card"}
        return replace(offer, instance_type="no such card x2 secure", details=details), spec

    def in_box(self, cloud: Cloud, box: Box, command: str) -> str | None:
        endpoint = self.emulator.endpoint(self.row(box))
        assert endpoint is not None
        return run(endpoint, command).stdout.decode()  # type: ignore[union-attr]

    def box_side(self, cloud: Cloud, box: Box, command: str) -> bool:
        endpoint = self.emulator.endpoint(self.row(box))
        assert endpoint is not None
        run(endpoint, "cat >end.sh; setsid sh end.sh >end.log 2>&1 </dev/null &", command.encode())
        return True

    def row(self, box: Box) -> Row:
        return self.emulator.book[box.id]


def test_it_is_opened_by_its_name() -> None:
    assert isinstance(open_cloud("runpod@team_a", api_key="k"), RunpodCloud)


def asked(text: str, **changes: object) -> OfferQuery:
    return replace(OfferQuery(request=GpuRequest.parse(text)), **changes)  # type: ignore[arg-type]


def spec(**changes: object) -> BoxSpec:
    base = BoxSpec(
        name=box_name(),
        nonce="n",
        owner='["cli","me"]',
        ssh_public_key=PUBLIC_KEY,
        deadline=datetime.now(UTC) + timedelta(hours=1),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def shapes(offers: list[Offer]) -> dict[tuple[str, str], tuple[float, str | None]]:
    return {(o.instance_type, o.region): (round(o.usd_per_hour, 2), o.unavailable) for o in offers}


class TestOffers:
    def test_each_tier_and_data_centre_is_an_offer_for_the_whole_pod(self, cloud: Cloud) -> None:
        assert shapes(cloud.offers(asked("A6000:2"))) == {
            ("NVIDIA RTX A6000 x2 secure", "US-KS-2"): (1.53, None),
            ("NVIDIA RTX A6000 x2 secure", "EU-RO-1"): (1.53, None),
            ("NVIDIA RTX A6000 x2 community", ""): (0.99, None),
        }

    def test_the_asked_disk_is_in_the_price(self, cloud: Cloud) -> None:
        (small, *_), (large, *_) = (cloud.offers(asked("A6000", disk_gb=gb)) for gb in (10, 740))
        assert large.usd_per_hour - small.usd_per_hour == pytest.approx(0.1)

    def test_what_cannot_be_had_is_kept_with_the_reason(self, cloud: Cloud, emulator: RunpodEmulator) -> None:
        emulator.cards["NVIDIA RTX A6000"].stock = {"US-KS-2": "NONE", "EU-RO-1": "LOW", "": "NONE"}
        emulator.cards["NVIDIA GeForce RTX 4090"].stock = {}
        found = shapes(cloud.offers(asked("A6000")))
        assert found["NVIDIA RTX A6000 x1 secure", "US-KS-2"][1] == "US-KS-2 has none free"
        assert found["NVIDIA RTX A6000 x1 secure", "EU-RO-1"][1] is None
        assert found["NVIDIA RTX A6000 x1 community", ""][1] == "the community tier has none free"
        nowhere = shapes(cloud.offers(asked("RTX4090")))
        assert [reason for _, reason in nowhere.values()] == [
            "the secure tier has none free",
            "the community tier has none free",
        ]

    def test_more_cards_than_a_pod_holds_are_told(self, cloud: Cloud) -> None:
        found = shapes(cloud.offers(asked("A6000:8")))
        assert (
            found["NVIDIA RTX A6000 x8 community", ""][1]
            == "a pod of the community tier has at most 4 of them"
        )
        assert found["NVIDIA RTX A6000 x8 secure", "US-KS-2"][1] is None

    def test_cards_are_known_by_their_id_and_a_slice_is_not_the_card(self, cloud: Cloud) -> None:
        found = {offer.details["gpu"]: offer for offer in cloud.offers(asked("RTX-PRO-6000"))}
        assert set(found) == {"NVIDIA RTX PRO 6000 Blackwell Server Edition"}
        (offer,) = found.values()
        assert (offer.gpu, offer.vram_gb) == ("RTX-PRO-6000-Server", 96)

    def test_c23_a_card_is_as_large_as_it_is_sold(self, cloud: Cloud) -> None:
        query = asked("RTX4090", min_vram_gb=24)
        assert all(offer.unavailable is None for offer in match(cloud.offers(query), query))

    def test_c25_regions_are_data_centres_in_any_spelling(self, cloud: Cloud) -> None:
        query = asked("A6000", regions=("eu-ro-1 ",))
        fits = [o.region for o in match(cloud.offers(query), query) if o.unavailable is None]
        assert fits == ["EU-RO-1"]

    def test_upgrades_and_alternatives_are_listed_once(self, cloud: Cloud, emulator: RunpodEmulator) -> None:
        query = asked("H100:8, A100-80GB:8, H100-PCIE:2")
        found = cloud.offers(query)
        assert len({(o.instance_type, o.region) for o in found}) == len(found)
        assert {o.gpu_count for o in found} == {8, 2}
        assert emulator.calls["catalog"] == 4, "one call for each count and tier"

    def test_a_card_that_the_catalog_does_not_know_is_found_by_its_own_name(
        self, cloud: Cloud, emulator: RunpodEmulator
    ) -> None:
        emulator.cards["NVIDIA Vera 1"] = Card("NVIDIA Vera 1", 512, 20.0, None)
        query = asked("raw:NVIDIA Vera 1:2")
        offer, *_ = match(cloud.offers(query), query)
        assert (offer.gpu, offer.gpu_count, offer.vram_gb, offer.unavailable) == (
            "NVIDIA Vera 1",
            2,
            512,
            None,
        )

    def test_it_rents_no_processor_cores(self, cloud: Cloud, emulator: RunpodEmulator) -> None:
        assert cloud.offers(asked("cpu:4")) == []
        assert emulator.requests == []


class TestCreate:
    @pytest.fixture(autouse=True)
    def _give_back(self, cloud: Cloud) -> Iterator[None]:
        yield
        for box in cloud.find(""):
            cloud.destroy(box)

    def body(self, cloud: Cloud, emulator: RunpodEmulator, gpus: str, **changes: object) -> dict[str, Any]:
        offer = next(o for o in cloud.offers(asked(gpus)) if o.unavailable is None)
        cloud.create(offer, spec(**changes))
        return next(request.body for request in emulator.requests if request.path == "/v2/pods")

    def test_the_request_carries_all_that_the_promise_needs(
        self, cloud: Cloud, emulator: RunpodEmulator
    ) -> None:
        wanted = spec(boot_script="true\n", env={"NCCL_DEBUG": "WARN"}, disk_gb=80)
        offer = cloud.offers(asked("A6000:2"))[0]
        box = cloud.create(offer, wanted)
        body = next(request.body for request in emulator.requests if request.path == "/v2/pods")
        assert body.pop("args").startswith("sh -c 'echo ")
        assert body == {
            "name": wanted.name,
            "image": "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404",
            "gpu": {"id": "NVIDIA RTX A6000", "count": 2, "minCudaVersion": "12.8"},
            "cloud": "SECURE",
            "dataCenterIds": ["US-KS-2"],
            "disk": 80,
            "ports": ["22/tcp"],
            "startSsh": True,
            "env": {"NCCL_DEBUG": "WARN", "PUBLIC_KEY": PUBLIC_KEY, "GPU_FLOWS_OWNER": wanted.owner},
        }
        assert (box.region, box.gpu, box.gpu_count) == ("US-KS-2", "RTX-A6000", 2)
        assert KEY not in json.dumps(body)

    @pytest.mark.parametrize(
        ("gpus", "image", "booted", "min_cuda"),
        [
            ("A6000", None, "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404", "12.8"),
            ("B300", None, "runpod/pytorch:1.0.7-cu1300-torch291-ubuntu2404", "13.0"),
            ("MI300X", None, "runpod/pytorch:2.4.0-py3.10-rocm6.1.0-ubuntu22.04", None),
            ("MI300X", "rocm/pytorch:latest", "rocm/pytorch:latest", None),
            ("A6000", "pytorch/pytorch:2.4.0-cuda12.4-cudnn9-runtime", None, "12.4"),
            ("A6000", "runpod/pytorch:2.1.0-py3.10-cuda11.8.0-devel-ubuntu22.04", None, "11.8"),
            ("A6000", "nvidia/cuda:12.6.3-runtime-ubuntu24.04", None, "12.6"),
            ("A6000", "ghcr.io/me/train:v3", None, None),
            ("B300", "ghcr.io/me/train:v3", None, "13.0"),
        ],
    )
    def test_a_host_is_as_new_as_the_image_needs(
        self,
        cloud: Cloud,
        emulator: RunpodEmulator,
        gpus: str,
        image: str | None,
        booted: str | None,
        min_cuda: str | None,
    ) -> None:
        body = self.body(cloud, emulator, gpus, image=image)
        assert body["image"] == (booted or image)
        assert body["gpu"].get("minCudaVersion") == min_cuda

    def test_a_community_host_has_no_data_centre(self, cloud: Cloud, emulator: RunpodEmulator) -> None:
        offer = next(o for o in cloud.offers(asked("A6000")) if o.details["tier"] == "COMMUNITY")
        cloud.create(offer, spec())
        body = next(request.body for request in emulator.requests if request.path == "/v2/pods")
        assert body["cloud"] == "COMMUNITY"
        assert "dataCenterIds" not in body

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"env": {f"V{n}": "x" for n in range(49)}}, "at most 50 variables, not 51"),
            ({"env": {"RUNPOD_API_KEY": "x"}}, "RUNPOD_API_KEY"),
            ({"env": {"PUBLIC_KEY": "x"}}, "PUBLIC_KEY"),
            ({"name": "x" * 192}, "1 to 191"),
        ],
    )
    def test_c49_what_runpod_would_refuse_is_refused_before_it_is_sent(
        self, cloud: Cloud, emulator: RunpodEmulator, changes: dict[str, Any], why: str
    ) -> None:
        with pytest.raises(RequestRefused, match=why):
            cloud.create(cloud.offers(asked("A6000"))[0], spec(**changes))
        assert emulator.calls["create"] == 0


class TestCredentials:
    @pytest.fixture(autouse=True)
    def _no_key(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for name in [name for name in os.environ if name.startswith("RUNPOD_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HOME", str(tmp_path))

    def test_each_account_has_its_own_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RUNPOD_API_KEY", "one")
        monkeypatch.setenv("RUNPOD_API_KEY__TEAM_A", "two")
        monkeypatch.setenv("RUNPOD_API_KEY__TEAM_A_PREVIOUS", "before")
        assert open_cloud("runpod").identity_secrets() == (b"one",)
        assert open_cloud("runpod@team-a").identity_secrets() == (b"two", b"before")

    def test_the_vendors_own_file_is_read(self, tmp_path: Path) -> None:
        (tmp_path / ".runpod").mkdir()
        (tmp_path / ".runpod" / "config.toml").write_text('[default]\napi_key = "filed"\n')
        assert open_cloud("runpod").identity_secrets() == (b"filed",)
        with pytest.raises(AuthenticationFailed):
            open_cloud("runpod@team_a").identity_secrets()

    def test_a_missing_key_is_told_at_the_first_call(self) -> None:
        cloud = open_cloud("runpod@team_a")
        with pytest.raises(AuthenticationFailed, match="RUNPOD_API_KEY__TEAM_A") as told:
            cloud.find("gf1-")
        assert told.value.scope is Scope.CLOUD
        assert cloud.clock_skew_s() is None

    def test_a_file_that_cannot_be_read_is_named(self, tmp_path: Path) -> None:
        (tmp_path / ".runpod").mkdir()
        (tmp_path / ".runpod" / "config.toml").write_text('api_key = "secret')
        with pytest.raises(AuthenticationFailed, match=r"config\.toml") as told:
            open_cloud("runpod").find("gf1-")
        assert "secret" not in str(told.value)


def test_its_clock_is_told(tmp_path: Path) -> None:
    with RunpodEmulator(skew_s=1000) as emulator:
        cloud = open_cloud("runpod", api_key=KEY, base_url=emulator.url)
        cloud.find("gf1-")
        assert cloud.clock_skew_s() == pytest.approx(1000, abs=30)


def test_the_watchdog_can_open_it_again(emulator: RunpodEmulator) -> None:
    options = json.loads(json.dumps({"ref": "runpod@team_a", "api_key": KEY, "base_url": emulator.url}))
    assert open_cloud(**options).find("gf1-") == []


def test_the_page_of_a_pod(cloud: Cloud) -> None:
    box = Box(cloud="runpod", id="abc", name="", state=BoxState.RUNNING)
    assert cloud.console_url(box) == "https://console.runpod.io/pods?id=abc"
