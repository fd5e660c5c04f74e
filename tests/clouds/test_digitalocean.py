"""DigitalOcean against its emulator: the suite of every cloud, its failures as a table, and its own quirks."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpu_flows.clouds.base import Box, BoxState, Cloud
from gpu_flows.clouds.digitalocean import DigitalOceanCloud
from tests.clouds.contract import CloudContract
from tests.clouds.ssh_client import PUBLIC_KEY, run
from tests.emulators.digitalocean import DELETES_ONLY, TOKEN, DigitalOceanEmulator
from tests.emulators.http import instead


def opened(emulator: DigitalOceanEmulator, **options: object) -> DigitalOceanCloud:
    defaults: dict[str, object] = {"token": TOKEN, "base_url": emulator.url, "ssh_port": emulator.ssh_port}
    return DigitalOceanCloud(**{**defaults, **options})  # type: ignore[arg-type]


class TestDigitalOceanCloud(CloudContract):
    request_text = "H100:8"
    unknown_id = "399999999"
    public_key = PUBLIC_KEY
    secrets = (TOKEN,)

    @pytest.fixture
    def emulator(self) -> Iterator[DigitalOceanEmulator]:
        with DigitalOceanEmulator() as emulator:
            yield emulator
            assert emulator.live() == []

    @pytest.fixture
    def cloud(self, emulator: DigitalOceanEmulator) -> DigitalOceanCloud:
        self.emulator_ = emulator
        return opened(emulator)

    def reopen(self, cloud: Cloud) -> Cloud:
        return opened(self.emulator_)

    @contextmanager
    def broken_listing(self, cloud: Cloud) -> Iterator[None]:
        self.emulator_.fault("list", instead(200, {"success": False, "error": "deprecated_endpoint"}))
        yield

    def foreign_box(self, cloud: Cloud, name: str) -> str | None:
        return self.emulator_.foreign(name).id if name else None

    def foreign_box_lives(self, cloud: Cloud, box_id: str) -> bool:
        row = self.emulator_.book[box_id]
        return row.deletes == 0 and row.ended_at is None

    def drive(self, cloud: Cloud, box: Box, state: BoxState) -> bool:
        words = {BoxState.STARTING: "new", BoxState.RUNNING: "active", BoxState.STOPPED: "off"}
        if state not in words:
            return False
        self.emulator_.starting.add(box.id)
        self.emulator_.book[box.id].state = words[state]
        return True


class TestDigitalOceanWithATokenOnTheBox(TestDigitalOceanCloud):
    """The same where droplets may destroy themselves, with real boxes behind them."""

    secrets = (TOKEN, DELETES_ONLY)

    @pytest.fixture
    def emulator(self, tmp_path: Path) -> Iterator[DigitalOceanEmulator]:
        with DigitalOceanEmulator(tmp_path / "boxes") as emulator:
            yield emulator
            assert emulator.live() == []

    @pytest.fixture
    def cloud(self, emulator: DigitalOceanEmulator) -> DigitalOceanCloud:
        self.emulator_ = emulator
        return opened(emulator, token_on_box=DELETES_ONLY)

    def in_box(self, cloud: Cloud, box: Box, command: str) -> str | None:
        return run(self._endpoint(box), command).stdout.decode()

    def box_side(self, cloud: Cloud, box: Box, command: str) -> bool:
        text = self.emulator_.as_seen_by(box.id, command)
        run(self._endpoint(box), f"setsid sh -c {shlex.quote(text)} >/dev/null 2>&1 </dev/null &")
        return True

    def _endpoint(self, box: Box):
        assert box.endpoint is not None
        # The test's own client compares host keys.
        known = self.emulator_.endpoint(self.emulator_.book[box.id])
        from dataclasses import replace

        return replace(box.endpoint, host_key=known.host_key)
