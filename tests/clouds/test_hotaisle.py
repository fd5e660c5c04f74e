"""Hot Aisle against its emulator, with real boxes behind it: the suite of every cloud, and a whole run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_flows import Installation, run
from gpu_flows.clouds import open_cloud
from gpu_flows.clouds.base import Box, BoxSpec, BoxState, Cloud
from gpu_flows.offers import Offer
from gpu_flows.settings import Settings
from tests.clouds.contract import CloudContract
from tests.clouds.ssh_client import PUBLIC_KEY
from tests.clouds.ssh_client import run as run_over_ssh
from tests.emulators.hotaisle import KEY, TEAM, HotAisleEmulator
from tests.emulators.http import instead


def options(emulator: HotAisleEmulator, state: Path) -> dict[str, Any]:
    return {"api_key": KEY, "team": TEAM, "base_url": emulator.base_url, "state": str(state)}


@pytest.fixture
def emulator(tmp_path: Path) -> Iterator[HotAisleEmulator]:
    with HotAisleEmulator(tmp_path / "boxes") as emulator:
        yield emulator
        assert emulator.live() == []


class TestHotAisleCloud(CloudContract):
    request_text = "MI300X:2"
    unknown_id = "enc9-gpuvm999"
    public_key = PUBLIC_KEY
    secrets = (KEY,)

    @pytest.fixture
    def cloud(self, emulator: HotAisleEmulator, tmp_path: Path) -> Cloud:
        self.emulator, self.state = emulator, tmp_path / "state"
        return self.reopen(None)

    def reopen(self, cloud: Cloud | None) -> Cloud:
        return open_cloud("hotaisle", **options(self.emulator, self.state))

    @contextmanager
    def broken_listing(self, cloud: Cloud) -> Iterator[None]:
        self.emulator.fault("list", instead(200, {"success": False, "error": "deprecated_endpoint"}))
        yield

    def foreign_box(self, cloud: Cloud, name: str) -> str | None:
        return self.emulator.foreign(name).id

    def foreign_box_lives(self, cloud: Cloud, box_id: str) -> bool:
        row = self.emulator.book[box_id]
        return row.deletes == 0 and row.ended_at is None

    def unrentable(self, offer: Offer, spec: BoxSpec) -> tuple[Offer, BoxSpec]:
        return replace(offer, details={"specs": self.emulator.types[2]["Specs"]}, instance_type="4x"), spec

    def drive(self, cloud: Cloud, box: Box, state: BoxState) -> bool:
        words = {
            BoxState.STARTING: "being built",
            BoxState.RUNNING: "running",
            BoxState.STOPPED: "shut off",
            BoxState.FAILED: "crashed",
        }
        if state not in words:
            return False
        self.until_running(cloud, box)
        self.emulator.book[box.id].state = words[state]
        return True

    def in_box(self, cloud: Cloud, box: Box, command: str) -> str | None:
        behind = self.emulator.endpoint(self.emulator.book[box.id])
        assert box.endpoint is not None
        assert behind is not None
        # The tests' own client insists on the host key.
        return run_over_ssh(replace(box.endpoint, host_key=behind.host_key), command).stdout.decode()

    def test_another_process_learns_what_hot_aisle_does_not_remember(
        self, cloud: Cloud, rent: Any, offer: Offer
    ) -> None:
        box = rent()
        (found,) = self.reopen(cloud).find(box.name)
        assert found.usd_per_hour == box.usd_per_hour == offer.usd_per_hour == 1.99
        assert found.created_at == box.created_at is not None
        assert found.details == {
            "owner": '["cli","contract"]',
            "minimum_minutes": 60,
            "billing_step_s": 60,
        }
        assert (found.gpu, found.gpu_count) == ("MI300X", 1)
        assert found.endpoint is None or found.endpoint.username == "hotaisle"

    def test_creates_of_a_team_take_turns_over_threads_and_processes(
        self, cloud: Cloud, offer: Offer, emulator: HotAisleEmulator
    ) -> None:
        inside, most = [0], [0]

        def watched(operation: Any) -> Any:
            with emulator.lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            reply = operation()
            # Long enough for another create to get in, were it let in.
            emulator._stopping.wait(0.05)
            return reply

        def leaving(operation: Any) -> Any:
            with emulator.lock:
                inside[0] -= 1
            return operation()

        emulator.fault("create", *[watched] * 6)
        emulator.fault("describe", *[leaving] * 6)
        specs = [self.spec() for _ in range(6)]
        order = {"options": options(emulator, self.state), "offer": offer.to_json(), "key": PUBLIC_KEY}
        others = [
            subprocess.Popen([sys.executable, "-c", CREATE, json.dumps({**order, "name": spec.name})])
            for spec in specs[:2]
        ]
        with ThreadPoolExecutor(4) as threads:
            boxes = list(threads.map(lambda spec: cloud.create(offer, spec), specs[2:]))
        assert [other.wait(60) for other in others] == [0, 0]
        assert most == [1]
        assert len({box.id for box in boxes}) == 4
        assert sorted(box.name for box in cloud.find("gf1-")) == sorted(spec.name for spec in specs)
        for box in cloud.find("gf1-"):
            cloud.destroy(box)


CREATE = """
import json, sys
from datetime import UTC, datetime
from gpu_flows.clouds import open_cloud
from gpu_flows.clouds.base import BoxSpec
from gpu_flows.offers import Offer

order = json.loads(sys.argv[1])
spec = BoxSpec(
    name=order["name"], nonce="n", owner="[]", ssh_public_key=order["key"], deadline=datetime.now(UTC)
)
open_cloud("hotaisle", **order["options"]).create(Offer.from_json(order["offer"]), spec)
"""


def test_a_whole_run_rents_trains_and_gives_back(emulator: HotAisleEmulator, tmp_path: Path) -> None:
    emulator.programs = tmp_path / "programs"
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.sh").write_text("echo one step\n")
    settings = Settings(namespace="team1", state=tmp_path / "state")
    opening = {"hotaisle": options(emulator, tmp_path / "state")}
    with Installation(settings, cloud_options=opening) as here:
        report = run(
            "train.sh",
            gpus="MI300X:2",
            code=tmp_path / "code",
            launcher="command",
            clouds=["hotaisle"],
            max_duration="10m",
            allow_unreaped=True,
            installation=here,
        )
    assert report.ok, report.to_json()
    (row,) = emulator.book.values()
    assert row.ended_at is not None
    assert report.cost.usd == pytest.approx(2 * 3.98), "the least charge, two hours"
