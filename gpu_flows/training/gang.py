"""The nodes of one job, which are started, followed and stopped as one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_flows.clouds.base import Box
from gpu_flows.clouds.errors import BoxLost, CloudError
from gpu_flows.errors import BadRequest, GpuFlowsError
from gpu_flows.progress import Progress, counted
from gpu_flows.training.causes import ExitCause
from gpu_flows.training.commands import NodeCommand, node_command
from gpu_flows.training.diagnose import NodeEvidence, diagnose
from gpu_flows.training.evidence import read_evidence
from gpu_flows.training.launch import Heartbeat, JobResult, LaunchOptions, LeaseTooShort, Node, job_base
from gpu_flows.training.logbook import LogBook, local_logs
from gpu_flows.training.memo import MEMO, written_memo
from gpu_flows.training.sources import check_sources
from gpu_flows.training.spec import TrainingSpec

if TYPE_CHECKING:
    from gpu_flows.remote.files import Fetched, Upload
    from gpu_flows.remote.jobs import JobStatus

CODE_FOLDER = "gpu-flows"
"""Folder within the login's home that holds the uploaded code, one folder a job."""

_CALL_TIMEOUT_S = 120.0
_MEET_TIMEOUT_S = 60.0
_UPLOAD_TIMEOUT_S = 3600.0
_FETCH_TIMEOUT_S = 3600.0
_KILL_GRACE_S, _KILL_TIMEOUT_S = 10.0, 60.0
_STRAGGLERS_S = 5.0
"""How long the other nodes may take to fail by themselves after the first one did."""
_LOOK_S, _LOOK_PAUSE_S = 60.0, 2.0
_TICK_S = 1.0
_STARTS = 3
"""How often a start is tried whose port was taken in the meantime."""
_MARK_DELIVERED = 'touch "$HOME/.gpu-flows/jobs/$1/delivered"'
_DELIVERED = 'cd "$HOME/.gpu-flows/jobs" 2>/dev/null && for d in */delivered; do [ -e "$d" ] && echo "${d%/*}"; done; :'


def _address(box: Box) -> str:
    """Return the address by which the other boxes of a lease reach a box."""
    address = box.private_address or (box.endpoint.host if box.endpoint else None)
    if address is None:
        raise BadRequest(f"box {box.id} has no address by which the other nodes reach it")
    return address


@contextlib.contextmanager
def _ticking(book: LogBook) -> Iterator[None]:
    """Show the state of progress bars also while nothing new comes."""

    async def tick() -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            book.tick()

    task = asyncio.create_task(tick())
    try:
        yield
    finally:
        task.cancel()


class Gang:
    """The nodes of one job, which live and die together; the arguments are those of `launch`."""

    def __init__(
        self, nodes: Sequence[Node], lease: str, spec: TrainingSpec, nproc: int, options: LaunchOptions
    ) -> None:
        self._nodes = sorted(nodes, key=lambda node: node.index)
        self._spec, self._nproc, self._options = spec, nproc, options
        self._base = job_base(lease, spec, options.key)
        self._hidden = (*options.secrets.values(), *spec.sensitive_values())
        self._job_id = ""
        self._seconds: dict[str, float] = {}
        self._stop: ExitCause | None = None
        self._drops = {node.index: asyncio.Event() for node in self._nodes}
        self._gone = {node.index: asyncio.Event() for node in self._nodes}

    async def run(self) -> JobResult:
        """Start the job or find it started, follow it, judge its end, and fetch its outputs."""
        for tries_left in reversed(range(_STARTS)):
            self._job_id, found = await self._attempt()
            if found:
                self._tell("job.reattached", f"job {self._job_id} was started before: following it")
                await asyncio.gather(*map(self._arm, self._nodes))
            else:
                await self._start_new()
            if self._options.detach:
                return JobResult(job_id=self._job_id, diagnosis=None, seconds=self._seconds, reattached=found)
            with self._phase("train"):
                lost, stopped = await self._follow()
            evidence = await self._evidence(lost, stopped)
            diagnosis = diagnose(evidence, stop=self._stop)
            if not (diagnosis.port_taken and tries_left) or self._options.only_attach:
                break
            # The port was free when it was asked for; somebody was quicker than torchrun.
            self._tell("port.taken", f"{diagnosis.sentence}: starting again on another port")
            await self._mark_delivered(lost)
        fetched = await self._fetch(lost) if self._spec.outputs else None
        await self._mark_delivered(lost)
        return JobResult(
            job_id=self._job_id,
            diagnosis=diagnosis,
            nodes=evidence,
            fetched=fetched,
            seconds=self._seconds,
            reattached=found,
        )

    # Starting

    async def _attempt(self) -> tuple[str, bool]:
        """Return the id of the job to follow, and whether it was started before.

        What runs, what succeeded, and what ended while nobody was there to hear of it is followed; only a
        failure that was told already is worth another attempt.
        """
        from gpu_flows.remote.jobs import list_jobs

        head = self._nodes[0].remote
        mine: dict[int, JobStatus] = {}
        for status in await list_jobs(head, timeout_s=_CALL_TIMEOUT_S):
            stem, _, number = status.job_id.rpartition("-")
            if stem == self._base and number.isdigit():
                mine[int(number)] = status
        if not mine:
            if self._options.only_attach:
                raise BadRequest(f"there is no job {self._base} to attach to")
            return f"{self._base}-1", False
        last = max(mine)
        status = mine[last]
        succeeded = status.exit_code == 0 and status.why == "exit"
        if self._options.only_attach or not status.has_ended or succeeded:
            return status.job_id, True
        told = (await head.script(_DELIVERED, timeout_s=_CALL_TIMEOUT_S)).decode().split()
        if status.job_id not in told:
            return status.job_id, True
        return f"{self._base}-{last + 1}", False

    async def _start_new(self) -> None:
        from gpu_flows.remote.jobs import start_job

        self._check_time_left()
        sources = check_sources(self._spec)
        for advice in sources.advice:
            self._tell("advice", advice)
        code = f"{CODE_FOLDER}/{self._base}"
        with self._phase("upload"):
            uploads = await asyncio.gather(*(self._upload(node, sources.path, code) for node in self._nodes))
        first = uploads[0]
        how = "unchanged" if first.unchanged else f"{first.sent_bytes / 1e6:.1f} MB sent"
        self._tell(
            "code.uploaded",
            f"{counted(first.files, 'file')} on {counted(len(uploads), 'box', 'boxes')}, {how}",
        )
        if first.ignored:
            names = ", ".join(first.ignored[:5]) + (" ..." if len(first.ignored) > 5 else "")
            self._tell("code.ignored", f"{len(first.ignored)} ignored by git and not uploaded: {names}")
        with self._phase("start"):
            address, port = await self._meeting_point()
            memo = written_memo(self._spec, key=self._options.key, nproc=self._nproc)
            plans = [self._plan(node, address, port, code) for node in self._nodes]
            await asyncio.gather(*map(self._arm, self._nodes))
            await asyncio.gather(
                *(
                    start_job(
                        node.remote,
                        self._job_id,
                        plan.command,
                        env=plan.env,
                        secrets=self._options.secrets,
                        files={**plan.files, MEMO: memo},
                        timeout_s=_CALL_TIMEOUT_S,
                    )
                    for node, plan in zip(self._nodes, plans, strict=True)
                )
            )
        self._tell("job.started", f"job {self._job_id} runs: {plans[0].summary}")

    def _plan(self, node: Node, address: str | None, port: int | None, code: str) -> NodeCommand:
        return node_command(
            self._spec,
            node=node.index,
            nodes=len(self._nodes),
            nproc=self._nproc,
            master_addr=address,
            master_port=port,
            code_dir=code,
        )

    async def _upload(self, node: Node, source: Path, target: str) -> Upload:
        from gpu_flows.remote.files import upload_tree

        return await upload_tree(
            node.remote,
            source,
            target,
            include=self._spec.include,
            progress=self._options.upload_progress if node.index == 0 else None,
            timeout_s=_UPLOAD_TIMEOUT_S,
        )

    async def _meeting_point(self) -> tuple[str | None, int | None]:
        """Return address and port where the nodes meet, found free on the first one just now."""
        if len(self._nodes) == 1:
            return None, None
        from gpu_flows.training.rendezvous import check_nodes_meet, find_port

        addresses = [_address(node.box) for node in self._nodes]
        remotes = [node.remote for node in self._nodes]
        await check_nodes_meet(list(zip(remotes, addresses, strict=True)), timeout_s=_MEET_TIMEOUT_S)
        return addresses[0], await find_port(remotes[0], addresses[0], timeout_s=_CALL_TIMEOUT_S)

    def _check_time_left(self) -> None:
        ends = min(node.deadline for node in self._nodes)
        left = ends - datetime.now(UTC)
        if left < self._spec.max_duration:
            raise LeaseTooShort(
                f"the boxes end at {ends:%Y-%m-%d %H:%M} UTC, in {left.total_seconds() / 60:.0f} min, but the "
                f"job may take {self._spec.max_duration.total_seconds() / 60:.0f} min",
                hint="tear the lease down and provision again, or lower max_duration",
            )

    async def _arm(self, node: Node) -> None:
        heartbeat, silence_s = self._options.heartbeat, self._options.heartbeat_timeout_s
        if heartbeat is None:
            return
        if self._options.detach or silence_s is None:
            await heartbeat.disarm(node.remote, timeout_s=_CALL_TIMEOUT_S)
        else:
            await heartbeat.arm(node.remote, silence_s=silence_s, timeout_s=_CALL_TIMEOUT_S)

    # Following

    async def _follow(self) -> tuple[dict[int, str], set[int]]:
        """Follow every node to its end; return the nodes that were lost, and those that we stopped."""
        lost: dict[int, str] = {}
        stopped: set[int] = set()
        followers = {asyncio.create_task(self._follow_node(node)): node for node in self._nodes}
        keepers: list[asyncio.Task[None]] = [
            asyncio.create_task(self._watch(node, task)) for task, node in followers.items()
        ]
        keepers += [asyncio.create_task(keep) for keep in (self._beat(), self._limits(), self._settle())]
        try:
            pending = set(followers)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                failed = [task for task in done if not self._ended_well(task, followers[task], lost)]
                if failed and pending:
                    # Whether the others are lost as well is asked at once, before they are told to stop.
                    for task in pending:
                        self._drops[followers[task].index].set()
                    late, pending = await asyncio.wait(pending, timeout=_STRAGGLERS_S)
                    for task in late:
                        self._ended_well(task, followers[task], lost)
                    stopped |= {followers[task].index for task in pending}
                    await self._kill([followers[task] for task in pending])
        finally:
            for unfinished in (*keepers, *followers):
                unfinished.cancel()
            await asyncio.gather(*followers, return_exceptions=True)
            for outcome in await asyncio.gather(*keepers, return_exceptions=True):
                if isinstance(outcome, Exception):
                    self._tell("keeper.failed", f"{type(outcome).__name__}: {outcome}")
        return lost, stopped

    @staticmethod
    def _ended_well(task: asyncio.Task[JobStatus], node: Node, lost: dict[int, str]) -> bool:
        """Tell whether a node's job ended well; note where its box was lost."""
        try:
            status = task.result()
        except (asyncio.CancelledError, BoxLost) as error:
            lost[node.index] = str(error) or "the box is gone"
            return False
        return status.exit_code == 0 and status.why == "exit"

    async def _follow_node(self, node: Node) -> JobStatus:
        from gpu_flows.remote.logs import follow_all

        left_s = max(60.0, (node.deadline - datetime.now(UTC)).total_seconds())
        with (
            LogBook(
                local_logs(self._options.folder, self._job_id, self._nodes[0].box.id),
                node=node.index,
                ranks=range(node.index * self._nproc, (node.index + 1) * self._nproc),
                secrets=self._hidden,
                show_line=self._options.show_line,
            ) as book,
            _ticking(book),
        ):
            return await follow_all(
                node.remote,
                self._job_id,
                book.sinks,
                offsets=book.offsets,
                deadline_s=left_s,
                on_drop=lambda error: self._dropped(node, error),
            )

    def _dropped(self, node: Node, error: GpuFlowsError) -> None:
        self._drops[node.index].set()
        self._tell("connection.lost", f"node {node.index}: {error.message}: connecting again")

    async def _watch(self, node: Node, follower: asyncio.Task[JobStatus]) -> None:
        """Ask the cloud about the box: now and then, and at once when its connection is lost."""
        dropped = self._drops[node.index]
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await dropped.wait()
            dropped.clear()
            try:
                box = await asyncio.to_thread(node.describe)
            except CloudError:
                # The cloud not answering says nothing about the box.
                box = node.box
            if not box.state.may_serve:
                self._gone[node.index].set()
                follower.cancel(
                    f"box {box.id} is {box.state}" + (f": {box.state_reason}" if box.state_reason else "")
                )
                return
            # A connection that is lost over and over must not make us ask over and over.
            await asyncio.sleep(_LOOK_PAUSE_S)

    async def _beat(self) -> None:
        """Renew the boxes' heartbeat, and ask whether the owner still wants them."""
        heartbeat, silence_s = self._options.heartbeat, self._options.heartbeat_timeout_s
        pause_s = 60.0 if silence_s is None else min(60.0, silence_s / 6)
        while True:
            try:
                if await asyncio.to_thread(self._options.wanted) is False:
                    await self._stop_all(ExitCause.CANCELLED, "the owner no longer wants it")
                    return
                if heartbeat is not None and silence_s is not None:
                    await asyncio.gather(*(self._renew(heartbeat, node) for node in self._nodes))
            except Exception as error:  # noqa: BLE001 - told; a heart that stops would end a healthy job
                self._tell("heartbeat.failed", f"a heartbeat failed: {type(error).__name__}: {error}")
            await asyncio.sleep(pause_s)

    async def _settle(self) -> None:
        """Look once more for boxes of another attempt, when no listing can hide them any more."""
        settle = self._options.settle
        if settle is None:
            return
        await asyncio.sleep(self._options.settle_after_s)
        try:
            await asyncio.to_thread(settle)
        except BoxLost as error:
            await self._stop_all(ExitCause.PREEMPTED, error.message)
        except GpuFlowsError as error:
            self._tell("duplicates.unknown", f"whether another attempt holds boxes cannot be told: {error}")

    async def _renew(self, heartbeat: Heartbeat, node: Node) -> None:
        from gpu_flows.remote.errors import SshError

        try:
            await heartbeat.renew(node.remote, timeout_s=_CALL_TIMEOUT_S)
        except (SshError, TimeoutError):
            # A lost connection is the follower's to mend; the heartbeat has several tries before it is missed.
            return
        except GpuFlowsError as error:
            self._tell("deadman.missing", f"node {node.index}: {error}")

    async def _limits(self) -> None:
        """Stop the job at the end of its time or money."""
        from gpu_flows.remote.errors import SshError
        from gpu_flows.remote.jobs import job_status

        allowed_s = self._spec.max_duration.total_seconds()
        used_s = 0.0
        with contextlib.suppress(SshError):
            status = await job_status(self._nodes[0].remote, self._job_id, timeout_s=_CALL_TIMEOUT_S)
            if status.started_at and status.box_time:
                used_s = (status.box_time - status.started_at) / timedelta(seconds=1)
        left_s, cause = max(0.0, allowed_s - used_s), ExitCause.DEADLINE
        if self._options.budget_s is not None and self._options.budget_s < left_s:
            left_s, cause = max(0.0, self._options.budget_s), ExitCause.BUDGET
        await asyncio.sleep(left_s)
        what = "its max_duration is over" if cause is ExitCause.DEADLINE else "its max_cost is spent"
        await self._stop_all(cause, what)

    async def _stop_all(self, cause: ExitCause, reason: str) -> None:
        self._stop = self._stop or cause
        self._tell("job.stopping", f"stopping job {self._job_id}: {reason}")
        await self._kill(self._nodes)

    async def _kill(self, nodes: Sequence[Node]) -> None:
        for outcome in await asyncio.gather(*map(self._kill_on, nodes), return_exceptions=True):
            # A box that cannot be reached is destroyed by the teardown, and its job with it.
            if isinstance(outcome, Exception) and not isinstance(outcome, GpuFlowsError | TimeoutError):
                raise outcome

    async def _kill_on(self, node: Node) -> None:
        """End the job on one node; not waited for when the box turns out to be lost."""
        from gpu_flows.remote.jobs import kill_job

        killing = asyncio.ensure_future(
            kill_job(node.remote, self._job_id, grace_s=_KILL_GRACE_S, timeout_s=_KILL_TIMEOUT_S)
        )
        gone = asyncio.ensure_future(self._gone[node.index].wait())
        try:
            await asyncio.wait({killing, gone}, return_when=asyncio.FIRST_COMPLETED)
            if killing.done() and (left := killing.result()):
                self._tell("job.unkillable", f"{left} processes on node {node.index} cannot be killed")
        finally:
            killing.cancel()
            gone.cancel()
            await asyncio.gather(killing, gone, return_exceptions=True)

    # Afterwards

    async def _evidence(self, lost: Mapping[int, str], stopped: set[int]) -> list[NodeEvidence]:
        from gpu_flows.remote.masking import Masker

        masker = Masker({f"secret {number}": value for number, value in enumerate(self._hidden)})
        # A traceback may quote what must not be shown, and ends up in the report.
        return [
            replace(
                found,
                log_tail=masker.mask(found.log_tail),
                ranks=[replace(rank, log_tail=masker.mask(rank.log_tail)) for rank in found.ranks],
            )
            for found in await asyncio.gather(
                *(
                    read_evidence(
                        node.remote,
                        self._job_id,
                        node=node.index,
                        lost=lost.get(node.index),
                        stopped=node.index in stopped,
                        timeout_s=_CALL_TIMEOUT_S,
                    )
                    for node in self._nodes
                )
            )
        ]

    async def _fetch(self, lost: Mapping[int, str]) -> Fetched | None:
        from gpu_flows.remote.errors import SshError
        from gpu_flows.remote.files import fetch

        head = self._nodes[0]
        if head.index in lost:
            return None
        target = self._spec.outputs_to or self._options.folder / "outputs"
        with self._phase("outputs"):
            try:
                return await fetch(
                    head.remote,
                    self._spec.outputs,
                    target,
                    cwd=f"{CODE_FOLDER}/{self._base}",
                    timeout_s=_FETCH_TIMEOUT_S,
                )
            except SshError as error:
                self._tell("outputs.failed", f"the outputs could not be fetched: {error}")
                return None

    async def _mark_delivered(self, lost: Mapping[int, str]) -> None:
        if self._nodes[0].index in lost:
            return
        from gpu_flows.remote.errors import SshError

        # At worst the next attempt hears of this end once more.
        with contextlib.suppress(SshError):
            await self._nodes[0].remote.script(_MARK_DELIVERED, self._job_id, timeout_s=_CALL_TIMEOUT_S)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._options.listener(Progress(name, "phase.began", ""))
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began

    def _tell(self, kind: str, message: str, **data: Any) -> None:
        self._options.listener(Progress("launch", kind, message, data))
