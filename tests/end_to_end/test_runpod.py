"""Whole runs on RunPod: the emulator of its API, with real boxes behind the pods."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpu_flows import Following, Installation, RunReport, run
from gpu_flows.clouds import open_cloud
from gpu_flows.clouds.base import BoxSpec
from gpu_flows.gpus.request import GpuRequest
from gpu_flows.leases.deadman import boot_script
from gpu_flows.offers import OfferQuery
from tests.clouds.ssh_client import PUBLIC_KEY
from tests.emulators.http import instead
from tests.emulators.runpod import KEY, NO_INSTANCES, RunpodEmulator, problem
from tests.end_to_end.conftest import Machine, until


@pytest.fixture
def emulator(tmp_path: Path) -> Iterator[RunpodEmulator]:
    tools = tmp_path / "tools"
    tools.mkdir()
    smi = tools / "nvidia-smi"
    smi.write_text('#!/bin/sh\nfor n in 1 2; do echo "NVIDIA RTX A6000, 49140, 570.86.15"; done\n')
    smi.chmod(0o755)
    with RunpodEmulator(tmp_path / "pods") as emulator:
        emulator.tools = tools
        yield emulator
        until(lambda: not emulator.live(), "nothing bills")


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.sh").write_text("echo training on $(nvidia-smi | wc -l) cards\n")
    return folder


def rent_and_train(emulator: RunpodEmulator, code: Path, lines: list[str], **parameters: object) -> RunReport:
    installation = Installation(cloud_options={"runpod": {"api_key": KEY, "base_url": emulator.url}})
    with installation:
        return run(
            "train.sh",
            code=code,
            gpus="A6000:2",
            clouds=["runpod"],
            max_duration="10m",
            installation=installation,
            following=Following(show_line=lambda _, line: lines.append(line)),
            **parameters,  # type: ignore[arg-type]
        )


def test_a_run_rents_trains_and_gives_back(
    machine: Machine, emulator: RunpodEmulator, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_FLOWS_NAMESPACE", "team1")
    theirs = emulator.stranger("somebody-elses")
    # The cheapest, a community host, is sold out by the time that it is asked for.
    emulator.fault("create", instead(400, problem(400, NO_INSTANCES).body))
    lines: list[str] = []
    report = rent_and_train(emulator, code, lines, launcher="command")
    assert report.ok, report.sentence
    assert lines[-1] == "training on 2 cards"
    assert [attempt.code for attempt in report.attempts] == ["CAPACITY_UNAVAILABLE", "OK"]
    assert report.left == []
    (row,) = [row for row in emulator.book.values() if not row.foreign]
    assert row.ended_at is not None
    assert theirs.ended_at is None
    told = repr([(request.path, request.query, request.body) for request in emulator.requests])
    assert KEY not in told + str(report) + "".join(lines)
    stored = [path.read_bytes() for path in machine.home.rglob("*") if path.is_file()]
    assert not any(KEY.encode() in data for data in stored)


def test_a_box_that_nobody_looks_after_ends_itself_at_its_deadline(emulator: RunpodEmulator) -> None:
    """What holds when the owner died in the moment of the create: the dead-man came along with it."""
    cloud = open_cloud("runpod", api_key=KEY, base_url=emulator.url)
    offer = cloud.offers(OfferQuery(request=GpuRequest.parse("A6000:2")))[0]
    deadline = datetime.now(UTC) + timedelta(seconds=2)
    wanted = BoxSpec(
        name="gf1-team1-leaseaaaaaaa-00-t4lw5c0-00000000-t4m7nc0",
        nonce="00000000",
        owner='["cli","nobody"]',
        ssh_public_key=PUBLIC_KEY,
        deadline=deadline,
    )
    end = cloud.self_destruct(wanted)
    assert end is not None
    boot = boot_script(deadline, end, length_s=2, tick_s=0.2, retry_s=1)
    # The API refuses at first, by curl and by Python: the dead-man asks again.
    busy = instead(500, problem(500, "try again").body)
    emulator.fault("action", busy, busy)
    cloud.create(offer, replace(wanted, boot_script=boot))
    until(lambda: not emulator.live(), "the box has ended itself")
    assert datetime.now(UTC) >= deadline.replace(microsecond=0)
    assert emulator.calls["delete"] == 0
    assert emulator.calls["action"] == 3
