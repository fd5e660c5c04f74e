"""Reads what a job left on a box: how its setup and its ranks ended, and the ends of their logs."""

from __future__ import annotations

from base64 import b64decode
from dataclasses import replace
from datetime import UTC, datetime
from itertools import takewhile
from typing import TYPE_CHECKING

from gpu_flows.training.diagnose import NodeEvidence, RankEvidence, SetupEvidence
from gpu_flows.training.shipped import shipped

if TYPE_CHECKING:
    from gpu_flows.remote.jobs import JobStatus
    from gpu_flows.remote.ssh import RemoteBox

TAIL_BYTES = 32 * 1024
"""How much of the end of each log is read."""


async def read_evidence(
    box: RemoteBox,
    job_id: str,
    *,
    node: int,
    lost: str | None = None,
    stopped: bool = False,
    timeout_s: float,
) -> NodeEvidence:
    """Read what a job left on one node, after it has ended.

    Args:
        box: The node's box.
        job_id: The job.
        node: Index of the node.
        lost: How its box was lost; then it is not asked.
        stopped: The node was ended because another one had failed.
        timeout_s: For all of it.

    Returns:
        The evidence. A box that cannot be asked any more is itself evidence: it was lost.
    """
    from gpu_flows.remote.errors import SshError
    from gpu_flows.remote.jobs import JobState, job_status

    if lost is not None:
        return NodeEvidence(node=node, lost=lost, stopped=stopped)
    try:
        status = await job_status(box, job_id, timeout_s=timeout_s)
        now = datetime.now(UTC)
        reply = await box.script(shipped("evidence.sh"), job_id, str(TAIL_BYTES), timeout_s=timeout_s)
    except SshError as error:
        return NodeEvidence(
            node=node, lost=f"it cannot be reached any more: {error.message}", stopped=stopped
        )
    if status.state is JobState.LOST:
        lost = f"the job is dead and left no record ({status.why or 'its recorder was killed'})"
    setup, ranks, log_tail = parse_evidence(reply)
    return NodeEvidence(
        node=node,
        exit_code=status.exit_code,
        why=status.why,
        lost=lost,
        stopped=stopped,
        setup=setup,
        ranks=ranks,
        log_tail=log_tail,
        free_kb=status.free_kb,
        skew_s=_skew_s(status, now),
    )


def parse_evidence(reply: bytes) -> tuple[SetupEvidence | None, tuple[RankEvidence, ...], str]:
    """Read the reply of ``evidence.sh``.

    Returns:
        How the setup ended, what the ranks left, and the end of the node's log.
    """
    setup = None
    ranks: dict[int, RankEvidence] = {}
    log_tail = ""
    lines = iter(reply.decode("ascii").splitlines())
    for header in lines:
        content = b64decode("".join(takewhile(lambda line: line != ".", lines)))
        match header.split():
            case ["setup", commands]:
                setup = _setup(content, total=int(commands))
            case ["rank", rank]:
                ranks[int(rank)] = _rank(int(rank), content)
            case ["tail", rank]:
                ranks[int(rank)] = replace(ranks[int(rank)], log_tail=content.decode("utf-8", "replace"))
            case ["log"]:
                log_tail = content.decode("utf-8", "replace")
    return setup, tuple(ranks[rank] for rank in sorted(ranks)), log_tail


def _setup(record: bytes, total: int) -> SetupEvidence | None:
    words = record.split()
    if len(words) == 4:  # <exit code> exit <epoch ms> <number of the command>
        return SetupEvidence(int(words[0]), number=int(words[3]), total=total)
    return SetupEvidence(None, total=total) if total else None


def _rank(rank: int, record: bytes) -> RankEvidence:
    words = record.split()
    if len(words) != 3:  # <exit code> <exit|signal> <epoch ms>; nothing while it runs, or when it was killed
        return RankEvidence(rank=rank, exit_code=None)
    return RankEvidence(
        rank=rank, exit_code=int(words[0]), by_signal=words[1] == b"signal", ended_ms=int(words[2])
    )


def _skew_s(status: JobStatus, now: datetime) -> float:
    return (status.box_time - now).total_seconds() if status.box_time else 0.0
