"""A training as a block: triggered, followed from another process, cancelled."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prefect import flow
from prefect.testing.standard_test_suites import BlockStandardTestSuite

from gpu_flows import BadRequest
from gpu_flows.training.causes import ScriptFailed
from prefect_blocks import CLEANUP, GpuTraining, GpuTrainingRun
from tests.end_to_end.conftest import PROJECT, Machine

CHECKSUM = "sha256:7bd7fd9559641f344b8036ee82e6c3c6bf1aff02c4190d0467162f7788c91299"

ATTACH = """
import json, sys
from prefect_blocks import GpuTrainingRun
print("report", json.dumps(GpuTrainingRun.from_json(json.loads(sys.argv[1])).fetch_result()))
"""


class TestStandard(BlockStandardTestSuite):
    test_has_a_valid_image = None  # asks the internet for a logo

    @pytest.fixture
    def block(self) -> type[GpuTraining]:
        return GpuTraining


def test_its_schema_does_not_change_unnoticed() -> None:
    assert GpuTraining._calculate_schema_checksum() == CHECKSUM


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.sh").write_text('echo "rate $1"; echo "model $1" > model.txt\n')
    (folder / "fail.sh").write_text("exit 3\n")
    (folder / "long.sh").write_text("exec sleep 600\n")
    return folder


def block(code: Path, entrypoint: str) -> GpuTraining:
    return GpuTraining(
        entrypoint=entrypoint, code=str(code), args=["1"], outputs=["*.txt"], max_duration="5m"
    )


def test_a_run_is_followed_from_another_process(prefect_server: Path, machine: Machine, code: Path) -> None:
    from prefect.settings import get_current_settings

    run = block(code, "train.sh").trigger()
    assert len(machine.boxes()) == 1
    done = subprocess.run(
        [sys.executable, "-c", ATTACH, json.dumps(run.to_json())],
        cwd=PROJECT,
        env={**os.environ, "PREFECT_API_URL": str(get_current_settings().api.url)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("report ")] or [
        done.stderr[-3000:]
    ]
    report = json.loads(line.removeprefix("report "))
    assert report["ok"]
    assert Path(report["outputs"][0]).read_text() == "model 1\n"
    assert machine.boxes() == []


def test_a_run_that_fails_is_named_and_gives_back(prefect_server: Path, machine: Machine, code: Path) -> None:
    run = asyncio.run(block(code, "fail.sh").atrigger())
    for _ in range(2):
        with pytest.raises(ScriptFailed):
            asyncio.run(run.afetch_result())
    assert machine.boxes() == []


def test_a_cancelled_run_is_gone_and_can_be_cancelled_again(
    prefect_server: Path, machine: Machine, code: Path
) -> None:
    run = GpuTrainingRun.from_json(block(code, "long.sh").trigger().to_json())
    assert len(run.cancel()["ended"]) == 1
    assert run.cancel()["ended"] == []
    assert machine.boxes() == []
    with pytest.raises(BadRequest, match="holds no boxes"):
        run.wait_for_completion()


@pytest.mark.table
def test_the_hook_of_a_failed_flow_ends_what_it_triggered(
    prefect_server: Path, machine: Machine, code: Path
) -> None:
    @flow(**CLEANUP)
    def triggers() -> None:
        block(code, "long.sh").trigger()
        assert len(machine.boxes()) == 1
        raise RuntimeError("lost the thread")

    assert triggers(return_state=True).is_failed()
    assert machine.boxes() == []
