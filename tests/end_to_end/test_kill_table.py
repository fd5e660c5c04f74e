"""SIGKILL of the orchestrating process at every step of the way; afterwards nothing is left.

Three finishers, each alone: a teardown by owner from a new process, the watchdog, the dead-man on the boxes.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from gpu_flows.leases.journal import process_start
from tests.end_to_end.conftest import Machine, until
from tests.end_to_end.orchestrator import STEPS

FINISHERS = ("teardown", "watchdog", "dead-man")
BOUND_S = {"teardown": 30, "watchdog": 30, "dead-man": 90}
"""From the kill until nothing is left. The dead-man's bound is the lease of the test, 25 s, two looks 10 s
apart, and the box's own end."""

SAMPLE = {("during create", "teardown"), ("during training", "watchdog"), ("during training", "dead-man")}


def rows() -> list[object]:
    return [
        pytest.param(
            step,
            finisher,
            id=f"{step}-{finisher}",
            marks=() if (step, finisher) in SAMPLE else pytest.mark.table,
        )
        for step in STEPS
        for finisher in FINISHERS
    ]


def watchdogs(home: Path) -> list[int]:
    """Return the watchdogs of a home; their command lines tell nothing, so their log tells."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                output = os.readlink(entry / "fd" / "1")
            except OSError:
                continue
            if b"gpu_flows.leases.watchdog" in command and output.startswith(str(home)):
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize(("step", "finisher"), rows())
def test_nothing_is_left_after_a_kill(machine: Machine, tmp_path: Path, step: str, finisher: str) -> None:
    code = tmp_path / "code"
    code.mkdir()
    # Long enough to be in the middle of it, and with a child that would outlive a careless kill.
    work = "echo training" if step == "during teardown" else "echo training; sleep 300 & sleep 300"
    (code / "train.sh").write_text(f"{work}\n")
    process = machine.start(["-m", "tests.end_to_end.orchestrator", step, str(code), finisher])
    output, errors = process.communicate(timeout=90)
    assert process.returncode == -signal.SIGKILL, errors
    assert output.endswith("killed\n"), (output, errors)
    killed_at = time.monotonic()
    dogs = watchdogs(machine.home)
    if step not in ("before create", "during teardown"):
        assert machine.boxes(), "the kill came too early: nothing had been rented"
    if finisher != "watchdog":
        for dog in dogs:
            os.kill(dog, signal.SIGKILL)
    if finisher == "teardown":
        done = machine.cli("teardown", "--owner", "kill-table")
        assert done.returncode == 0, done.stdout + done.stderr
        assert not machine.boxes()
    until(lambda: not machine.boxes() and not machine.processes(), f"{finisher} ends all", BOUND_S[finisher])
    until(lambda: all(process_start(dog) is None for dog in dogs), "the watchdogs have ended", 30)
    print(f"{step}: {finisher} was done after {time.monotonic() - killed_at:.1f} s")
