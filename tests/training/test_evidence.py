"""A node's command as a job of a box, and what is read back from it: under every shell, busybox' tools included."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu_flows.remote.jobs import JobState, job_status, kill_job, start_job
from gpu_flows.training.causes import ExitCause
from gpu_flows.training.commands import node_command
from gpu_flows.training.diagnose import NodeEvidence, diagnose
from gpu_flows.training.evidence import parse_evidence, read_evidence
from gpu_flows.training.spec import TrainingSpec
from tests.remote.shellbox import SHELLS, ShellBox
from tests.training.nodes import BASE_PYTHON, STAND_IN

SECRET = "hf_inventedA1"
TRAIN = """\
import os, sys, time
rank = int(os.environ["RANK"])
print("rank", rank, "has a token:", bool(os.environ.get("HF_TOKEN")), flush=True)
if "--hang" in sys.argv:
    time.sleep(600)
if "--fail" in sys.argv and rank == 1:
    raise ValueError("bad batch")
open("out.txt", "a").write("done")
if "--fail" in sys.argv:
    time.sleep(600)
"""


@pytest.fixture(params=SHELLS)
def box(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ShellBox]:
    box = ShellBox(tmp_path, request.param)
    python = box.tools / "python3"
    python.unlink(missing_ok=True)
    python.write_text(f'#!/bin/sh\nexec "{BASE_PYTHON}" "$@"\n')
    python.chmod(0o755)
    (box.home / "code").mkdir()
    (box.home / "code" / "train.py").write_text(TRAIN)
    yield box
    box.close()


async def start(box: ShellBox, *args: str, setup: tuple[str, ...] = ()) -> None:
    spec = TrainingSpec(entrypoint="train.py", args=args, setup=setup, env={"PYTHONPATH": str(STAND_IN)})
    plan = node_command(spec, node=0, nodes=1, nproc=2, code_dir="code")
    await start_job(
        box, "j-1", plan.command, env=plan.env, secrets={"HF_TOKEN": SECRET}, files=plan.files, timeout_s=30
    )


async def ended(box: ShellBox, **how: bool) -> NodeEvidence:
    deadline = time.monotonic() + 60
    while (await job_status(box, "j-1", timeout_s=30)).state is not JobState.EXITED:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    return await read_evidence(box, "j-1", node=0, timeout_s=30, **how)


def test_a_job_that_ends_well(box: ShellBox) -> None:
    async def scenario() -> NodeEvidence:
        await start(box, setup=("true", "export X=1"))
        return await ended(box)

    found = asyncio.run(scenario())
    assert found.succeeded
    assert [(rank.rank, rank.exit_code, rank.log_tail) for rank in found.ranks] == [(0, 0, ""), (1, 0, "")]
    assert found.setup is not None
    assert (found.setup.exit_code, found.setup.total) == (0, 2)
    assert abs(found.skew_s) < 5
    assert (box.home / "code" / "out.txt").read_text() == "donedone", (
        "the working directory is the upload's root"
    )
    assert (box.home / ".gpu-flows/jobs/j-1/ranks/0.log").read_text() == "rank 0 has a token: True\n"


def test_c35_a_job_whose_rank_fails(box: ShellBox) -> None:
    async def scenario() -> NodeEvidence:
        await start(box, "--fail")
        return await ended(box)

    found = diagnose([asyncio.run(scenario())])
    assert found.cause == ExitCause.SCRIPT_ERROR
    assert found.sentence == "rank 1 exited with code 1: ValueError: bad batch (train.py:7)"


def test_c51_a_job_that_is_killed_leaves_no_process_and_no_secret(
    box: ShellBox, until: Callable[..., None]
) -> None:
    async def scenario() -> NodeEvidence:
        await start(box, "--hang")
        while not list(box.home.glob(".gpu-flows/jobs/j-1/ranks/1.log")):
            await asyncio.sleep(0.05)
        assert await kill_job(box, "j-1", grace_s=5, timeout_s=30) == 0
        return await ended(box)

    found = asyncio.run(scenario())
    assert found.why == "cancelled"
    assert diagnose([found]).cause == ExitCause.CANCELLED
    assert diagnose([found], stop=ExitCause.DEADLINE).cause == ExitCause.DEADLINE
    until(lambda: box.processes() == [], timeout_s=10)
    for path in box.home.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def test_a_failed_setup_is_read_back(box: ShellBox) -> None:
    async def scenario() -> NodeEvidence:
        await start(box, setup=("true", "echo no such package >&2; exit 4"))
        return await ended(box)

    found = diagnose([asyncio.run(scenario())])
    assert found.cause == ExitCause.SETUP_FAILED
    assert found.sentence == "setup command 2 of 2 failed with exit code 4: no such package"


def test_a_lost_box_is_not_asked() -> None:
    found = asyncio.run(read_evidence(None, "j-1", node=1, lost="interrupted", timeout_s=1))
    assert (found.lost, found.outcome) == ("interrupted", "preempted")


def test_any_bytes_come_back_from_a_log() -> None:
    raw = b"\xff\x00 rank 9\n.\n\r\xe6"
    reply = b"rank 3\n.\ntail 3\n" + base64.b64encode(raw) + b"\n.\nlog\n.\n"
    setup, (rank,), log = parse_evidence(reply)
    assert (setup, log) == (None, "")
    assert (rank.rank, rank.exit_code, rank.log_tail) == (3, None, raw.decode("utf-8", "replace"))
