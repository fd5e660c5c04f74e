"""RunPod: the suite of every cloud, and what is RunPod's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_flows.clouds import open_cloud
from gpu_flows.clouds.base import Box, BoxSpec, BoxState, Cloud
from gpu_flows.clouds.runpod import RunpodCloud
from gpu_flows.offers import Offer
from tests.clouds.contract import CloudContract, until
from tests.clouds.ssh_client import PUBLIC_KEY, run
from tests.emulators.http import Row, instead
from tests.emulators.runpod import KEY, RunpodEmulator


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
