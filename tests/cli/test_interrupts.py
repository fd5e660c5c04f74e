"""Ctrl-C and SIGTERM, sent to a real process: the first tears down, the second tells, the third leaves."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, Program

Start = Callable[..., Program]

HOLD = "echo begun; sleep 600"
RUN = ("run", HOLD, "--launcher", "command", "--gpus", "cpu", "--max-duration", "10m", "--code", "code")

SLOW_DESTROY = """
import pathlib, time
from gpu_flows.clouds.local.cloud import LocalCloud
destroy = LocalCloud.destroy
def slow(self, box):
    while pathlib.Path("hold").exists():
        time.sleep(0.02)
    destroy(self, box)
LocalCloud.destroy = slow
"""
NO_DESTROY = """
from gpu_flows.clouds.errors import CloudUnreachable
from gpu_flows.clouds.local.cloud import LocalCloud
from gpu_flows.runs.steps import teardown_box
def broken(self, box):
    raise CloudUnreachable("the cloud does not answer")
LocalCloud.destroy = broken
teardown_box.__kwdefaults__["timeout_s"] = 0
"""
NEVER_READY = """
import dataclasses, sys
from gpu_flows.clouds.base import BoxState
from gpu_flows.clouds.local.cloud import LocalCloud
describe = LocalCloud.describe
def starting(self, box):
    now = describe(self, box)
    if now.state is BoxState.GONE:
        return now
    sys.stderr.write(f"asked for {box.id}\\n")
    return dataclasses.replace(now, state=BoxState.STARTING, endpoint=None)
LocalCloud.describe = starting
"""


@pytest.fixture(autouse=True)
def code() -> None:
    """Give each job a folder of its own to upload."""
    Path("code").mkdir()
    Path("code/data.txt").touch()


def boxes(home: Path) -> list[str]:
    """Return the boxes that are there."""
    return [path.name for path in (home / "state" / "local" / "boxes").glob("*")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_tears_down_and_says_so(
    number: signal.Signals, program: Start, home: Path
) -> None:
    running = program(*RUN, "--owner", "cut", "--nodes", "2")
    running.wait_for("rank 0     begun")
    assert len(boxes(home)) == 2
    running.signal(number)
    running.wait_for("tearing down 2 boxes; press Ctrl-C again to see what is still alive")
    said = running.end()
    assert said.code == 130
    assert "everything that was rented is proven gone" in said.err
    assert "Traceback" not in said.err
    assert boxes(home) == []


def test_the_second_interruption_tells_what_is_alive_and_how_to_end_it(program: Start, home: Path) -> None:
    running = program(*RUN, "--owner", "cut", before=SLOW_DESTROY)
    running.wait_for("rank 0     begun")
    Path("hold").touch()
    running.signal(signal.SIGINT)
    running.wait_for("tearing down 1 box;")
    running.signal(signal.SIGINT)
    assert boxes(home)[0] in running.wait_for("still alive: local box")
    running.wait_for("to end them: gpu-flows teardown --owner cut")
    Path("hold").unlink()
    assert running.end().code == 130
    assert boxes(home) == []


def test_the_third_interruption_leaves_and_the_watchdog_goes_on(program: Start, home: Path) -> None:
    running = program(*RUN, "--owner", "cut", before=SLOW_DESTROY)
    running.wait_for("rank 0     begun")
    Path("hold").touch()
    for text in ("tearing down", "press Ctrl-C once more"):
        running.signal(signal.SIGINT)
        running.wait_for(text)
    running.signal(signal.SIGINT)
    assert running.end(timeout_s=5).code == 4
    until = time.monotonic() + 30
    while boxes(home) and time.monotonic() < until:
        time.sleep(0.1)
    assert boxes(home) == [], "the watchdog did not tear down"


def test_an_interruption_whose_teardown_fails_is_exit_code_4(program: Start, home: Path, cli: Cli) -> None:
    running = program(*RUN, "--owner", "cut", "--format", "json", before=NO_DESTROY)
    running.wait_for("rank 0     begun")
    running.signal(signal.SIGINT)
    said = running.end()
    assert said.code == 4
    assert "not everything is proven gone" in said.err
    assert said.json["ok"] is False
    assert "gpu-flows teardown --owner cut" in said.json["error"]["message"]
    assert cli("teardown", "--owner", "cut").code == 0
    assert boxes(home) == []


def test_a_report_with_boxes_left_is_exit_code_4(program: Start, home: Path, cli: Cli) -> None:
    words = [word.replace("sleep 600", "true") for word in RUN]
    said = program(*words, "--owner", "left", "--format", "json", before=NO_DESTROY).end()
    assert said.code == 4
    assert said.json["cause"] == "succeeded"
    assert said.json["ok"] is False
    assert len(said.json["left"]) == 1
    assert cli("teardown", "--owner", "left").code == 0
    assert boxes(home) == []


def test_waiting_for_several_boxes_can_be_interrupted(program: Start, home: Path) -> None:
    renting = program(
        *("provision", "--gpus", "cpu", "--nodes", "2", "--max-duration", "10m", "--ready-timeout-s", "600"),
        before=NEVER_READY,
    )
    for box in {renting.wait_for("rented local box").split()[4] for _ in range(2)}:
        renting.wait_for(f"asked for {box}")
    renting.signal(signal.SIGINT)
    renting.wait_for("tearing down 2 boxes")
    said = renting.end(timeout_s=15)
    assert said.code == 130
    assert boxes(home) == []


def test_an_interrupted_launch_only_stops_following(program: Start, home: Path, cli: Cli) -> None:
    assert cli("provision", "--gpus", "cpu", "--owner", "kept", "--max-duration", "10m").code == 0
    words = (
        "launch",
        HOLD,
        "--launcher",
        "command",
        "--code",
        "code",
        "--max-duration",
        "5m",
        "--owner",
        "kept",
    )
    following = program(*words)
    following.wait_for("rank 0     begun")
    following.signal(signal.SIGINT)
    said = following.end()
    assert said.code == 130
    assert "run on for 30 min" in said.err
    assert "gpu-flows attach --owner kept" in said.err
    assert len(boxes(home)) == 1
    assert cli("logs", "--owner", "kept", "--rank", "0").out == "begun\n"

    showing = program("logs", "--owner", "kept", "-f")
    assert showing.process.stdout is not None
    while "begun" not in showing.process.stdout.readline():
        pass
    showing.signal(signal.SIGINT)
    said = showing.end()
    assert said.code == 130
    assert said.err == ""

    first = program("attach", "--owner", "kept")
    first.wait_for("was started before")
    second = cli("attach", "--owner", "kept")
    assert second.code == 2
    assert "another process of this machine follows this job" in second.err
    first.signal(signal.SIGINT)
    assert first.end().code == 130
    assert cli("teardown", "--owner", "kept").code == 0


def test_the_boxes_of_a_run_that_goes_on_can_be_looked_at_but_not_taken(program: Start, cli: Cli) -> None:
    running = program(*RUN, "--owner", "mine")
    running.wait_for("rank 0     begun")
    assert cli("ps", "--format", "json").json["boxes"][0]["owner"] == ["cli", "mine"]
    assert cli("logs", "--owner", "mine", "--rank", "0").out == "begun\n"
    assert cli("ssh", "--owner", "mine", "--", "true").code == 0
    said = cli("attach", "--owner", "mine")
    assert said.code == 2
    assert "logs -f" in said.err
    running.signal(signal.SIGINT)
    assert running.end().code == 130
