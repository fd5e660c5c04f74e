"""What the keepers of a job do: the second look for twins, the heartbeat, the owner's word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_flows import Following, Installation, run
from gpu_flows.clouds.errors import BoxLost
from gpu_flows.leases.lease import Owner
from gpu_flows.leases.provision import Provisioner
from gpu_flows.progress import Progress
from tests.end_to_end.conftest import Machine, machine

__all__ = ["machine"]


class Until:
    """Wants its boxes until it is told not to; fails once on the way."""

    def __init__(self) -> None:
        self.wanted = True
        self.asked = 0

    def wants(self, owner: Owner | None, namespace: str, lease: str) -> bool | None:
        self.asked += 1
        if self.asked == 3:
            raise OSError("too many open files")
        return self.wanted


def long_job(tmp_path: Path) -> Path:
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.sh").write_text("echo training; sleep 600\n")
    return code


def test_a_job_that_its_owner_no_longer_wants_is_stopped(machine: Machine, tmp_path: Path) -> None:
    liveness, told = Until(), list[Progress]()

    def show(_: str, line: str) -> None:
        liveness.wanted = False

    report = run(
        "train.sh",
        code=long_job(tmp_path),
        gpus="cpu",
        max_duration="10m",
        installation=Installation(listener=told.append, liveness=liveness),
        following=Following(show_line=show, heartbeat_timeout_s=6),
    )
    assert report.cause == "cancelled"
    assert any(progress.kind == "heartbeat.failed" for progress in told), "one failed heartbeat is told"
    assert machine.boxes() == []


def test_an_attempt_that_has_to_yield_stops_its_job(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def settle(self: Provisioner, lease: Any) -> Any:
        looks.append(1)
        if len(looks) > 1:
            raise BoxLost("node 0 is held by the box of another attempt")
        return lease

    monkeypatch.setattr(Provisioner, "settle_duplicates", settle)
    report = run(
        "train.sh",
        code=long_job(tmp_path),
        gpus="cpu",
        max_duration="10m",
        following=Following(max_preemptions=0),
    )
    assert len(looks) == 2, "once before the start, and once after the lag of the cloud"
    assert report.cause == "preempted"
    assert machine.boxes() == []
