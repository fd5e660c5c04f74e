"""Whole runs on RunPod: the emulator of its API, with real boxes behind the pods."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_flows import Following, Installation, RunReport, run
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
    assert lines == ["training on 2 cards"]
    assert [attempt.code for attempt in report.attempts] == ["CAPACITY_UNAVAILABLE", "OK"]
    assert report.left == []
    (row,) = [row for row in emulator.book.values() if not row.foreign]
    assert row.ended_at is not None
    assert theirs.ended_at is None
    told = repr([(request.path, request.query, request.body) for request in emulator.requests])
    assert KEY not in told + str(report) + "".join(lines)
    assert KEY not in "".join(
        path.read_text("utf-8", "replace") for path in machine.home.rglob("*.*") if path.is_file()
    )
