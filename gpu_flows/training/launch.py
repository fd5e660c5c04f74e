"""Running one job on every node of a lease: started once, followed to its end, stopped as one."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gpu_flows.clouds.base import Box
from gpu_flows.errors import BadRequest
from gpu_flows.progress import Listener, ignore
from gpu_flows.training.causes import Diagnosis
from gpu_flows.training.diagnose import NodeEvidence
from gpu_flows.training.logbook import ShowLine, show_nothing
from gpu_flows.training.spec import TrainingSpec

if TYPE_CHECKING:
    from gpu_flows.remote.files import Fetched
    from gpu_flows.remote.ssh import RemoteBox


class Heartbeat(Protocol):
    """Tells a box that somebody still follows its job; without it the box ends itself before its deadline."""

    async def arm(self, box: RemoteBox, *, silence_s: float, timeout_s: float) -> None:
        """Let the box end itself after so many seconds of silence."""
        ...

    async def renew(self, box: RemoteBox, *, timeout_s: float) -> None:
        """Break the silence."""
        ...

    async def disarm(self, box: RemoteBox, *, timeout_s: float) -> None:
        """Leave the box its deadline alone."""
        ...


class LeaseTooShort(BadRequest):
    """The boxes end before the job could."""

    code = "LEASE_TOO_SHORT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One box as a launch sees it.

    Attributes:
        index: Index of the node.
        box: The box.
        remote: The connection to it.
        describe: Asks its cloud how it is; blocks.
        deadline: When it must be gone, aware.
    """

    index: int
    box: Box
    remote: RemoteBox
    describe: Callable[[], Box]
    deadline: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """How a job is run and followed.

    Attributes:
        folder: Folder of this machine for its logs and outputs.
        key: Tells two jobs of one lease apart that have the same entrypoint and arguments.
        secrets: Values of the spec's secrets, by name.
        heartbeat: Breaks the silence of the boxes; None where nothing listens.
        heartbeat_timeout_s: How long the boxes live on without hearing from us; None for their deadline alone.
        detach: Return as soon as the job runs.
        only_attach: Follow the last job of the same key, entrypoint and arguments, and start none.
        budget_s: Seconds until the money is spent; None for no limit.
        wanted: Tells whether the owner still wants it; asked at each heartbeat.
        settle: Ends boxes of other attempts of the same owner; raises `BoxLost` where ours has to yield. Called
            once more while the job runs, since a listing may not have shown such a box before.
        settle_after_s: When that is: the longest lag of the clouds.
        show_line: Shown what the job writes: where from, and the line.
        upload_progress: Told the bytes sent and the bytes in all.
        listener: Told what happens.
    """

    folder: Path
    key: str = ""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    heartbeat: Heartbeat | None = None
    heartbeat_timeout_s: float | None = 1800
    detach: bool = False
    only_attach: bool = False
    budget_s: float | None = None
    wanted: Callable[[], bool | None] = lambda: None
    settle: Callable[[], object] | None = None
    settle_after_s: float = 60.0
    show_line: ShowLine = show_nothing
    upload_progress: Callable[[int, int], None] | None = None
    listener: Listener = ignore


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """How a job ended.

    Attributes:
        job_id: Its id on the boxes.
        diagnosis: The cause; None while it runs on (detached).
        nodes: What each node left.
        fetched: The outputs; None when there were none to fetch or no box to fetch them from.
        seconds: Length of each phase.
        reattached: Whether it had been started before.
    """

    job_id: str
    diagnosis: Diagnosis | None
    nodes: Sequence[NodeEvidence] = ()
    fetched: Fetched | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    reattached: bool = False


def job_base(lease: str, spec: TrainingSpec, key: str) -> str:
    """Return what the ids of a job's attempts start with: the same for every retry of the same call."""
    text = json.dumps([lease, key, spec.entrypoint, list(spec.args)], ensure_ascii=False)
    stem = re.sub(r"[^a-z0-9]+", "-", (key or Path(spec.target).stem).lower()).strip("-")[:24] or "job"
    return f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


async def launch(
    nodes: Sequence[Node], lease: str, spec: TrainingSpec, *, nproc: int, options: LaunchOptions
) -> JobResult:
    """Run a job on every node, follow it to its end, and fetch its outputs.

    Args:
        nodes: The boxes, ready, in the order of their index.
        lease: The lease id.
        spec: What to run.
        nproc: Processes on each node.
        options: How.

    Returns:
        How it ended; a failed training is a result and not an exception.

    Raises:
        LeaseTooShort: When a new job would not fit into what is left of the lease.
        BadRequest: When the spec's files are missing.
        SshError: When the boxes cannot be reached to start it.
    """
    from gpu_flows.training.gang import Gang

    return await Gang(nodes, lease, spec, nproc, options).run()
