"""AWS: the suite of every cloud, and what is AWS's own."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpu_flows.clouds.base import Box, BoxState, Cloud
from gpu_flows.endpoint import SshEndpoint
from tests.clouds.aws_account import opened, share_models
from tests.clouds.contract import CloudContract, until
from tests.clouds.ssh_client import PUBLIC_KEY, run
from tests.emulators.aws import KEY_ID, SECRET, AwsEmulator
from tests.emulators.http import HTML

STATES = {
    BoxState.STARTING: "pending",
    BoxState.RUNNING: "running",
    BoxState.STOPPED: "stopped",
    BoxState.ENDING: "shutting-down",
}


@pytest.fixture(scope="module", autouse=True)
def _models() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        share_models(patch)
        yield


@pytest.fixture
def emulator(tmp_path: Path) -> Iterator[AwsEmulator]:
    with AwsEmulator(tmp_path / "instances") as emulator:
        yield emulator
        until(lambda: not emulator.live(), f"nothing bills: {emulator.live()}")


class TestAwsCloud(CloudContract):
    request_text = "H100:8"
    unknown_id = "i-0123456789abcdef0"
    public_key = PUBLIC_KEY
    secrets = (SECRET, KEY_ID)

    @pytest.fixture(autouse=True)
    def _emulator(self, emulator: AwsEmulator, tmp_path: Path) -> None:
        self.emulator = emulator
        self.cache = str(tmp_path / "cache")

    @pytest.fixture
    def cloud(self, _emulator: None) -> Cloud:
        return opened(self.emulator, cache=self.cache)

    def reopen(self, cloud: Cloud) -> Cloud:
        return opened(self.emulator, cache=self.cache)

    @contextmanager
    def broken_listing(self, cloud: Cloud) -> Iterator[None]:
        self.emulator.always["DescribeInstances"] = HTML
        yield
        del self.emulator.always["DescribeInstances"]

    def foreign_box(self, cloud: Cloud, name: str) -> str | None:
        return self.emulator.stranger(name).id

    def foreign_box_lives(self, cloud: Cloud, box_id: str) -> bool:
        return bool(self.emulator.instance(box_id)._state.name == "running")

    def drive(self, cloud: Cloud, box: Box, state: BoxState) -> bool:
        if state in STATES:
            self.until_running(cloud, box)
            self.emulator.drive(box.id, STATES[state])
        return state in STATES

    def in_box(self, cloud: Cloud, box: Box, command: str) -> str | None:
        return run(self.endpoint(cloud, box), command).stdout.decode()

    def box_side(self, cloud: Cloud, box: Box, command: str) -> bool:
        # As the dead-man does it: a process of the box that its own end takes along.
        run(self.endpoint(cloud, box), f"setsid sh -c {shlex.quote(command)} >/dev/null 2>&1 </dev/null &")
        return True

    def endpoint(self, cloud: Cloud, box: Box) -> SshEndpoint:
        until(lambda: cloud.describe(box).endpoint is not None, "it has an address")
        endpoint = self.emulator.endpoint(self.emulator.book[box.id])
        assert endpoint is not None
        return endpoint
