"""From what the nodes left to why the job ended. Pure.

torchrun answers 1 whatever happened, so the ranks' own records decide: the first rank that failed by itself is the
cause. Those that were ended because of it, or failed because it was gone, are not.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from gpu_flows.training.causes import Diagnosis, ExitCause
from gpu_flows.training.tracebacks import LogEnd, read_log_end

STOPPED = "stopped"
"""Outcome of a node that was ended because another one had failed."""

_TERM, _KILL = 128 + signal.SIGTERM, 128 + signal.SIGKILL
_TRUSTED_SKEW_S = 5.0
"""Clocks that differ by less are taken for equal: the measurement is no better."""
_FULL_KB = 1024


@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    """What one rank left.

    Attributes:
        rank: Global rank.
        exit_code: Its exit code; 128 + n stands for signal n; None when it left no record, as one that was killed.
        by_signal: Whether a signal ended it.
        ended_ms: When it ended, epoch milliseconds by its box's clock.
        log_tail: The end of its log.
    """

    rank: int
    exit_code: int | None
    by_signal: bool = False
    ended_ms: int = 0
    log_tail: str = field(default="", repr=False)

    @cached_property
    def end(self) -> LogEnd:
        """What the end of its log says."""
        return read_log_end(self.log_tail)


@dataclass(frozen=True, slots=True)
class SetupEvidence:
    """How the setup of a node ended.

    Attributes:
        exit_code: 0 when all is well; None when it left no record.
        number: The command that failed, from 1; 0 when the box was found unfit after it.
        total: Number of commands.
    """

    exit_code: int | None
    number: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvidence:
    """What one node left.

    Attributes:
        node: Index of the node.
        exit_code: Exit code of its job; None where nobody knows.
        why: The job's own word: ``exit``, ``signal``, ``oom``, ``cancelled``.
        lost: How its box was lost; None for a box that is still there.
        stopped: It was ended because another node had failed.
        setup: How its setup ended; None when there was none and nothing went wrong.
        ranks: What its ranks left.
        log_tail: The end of the node's own log: setup and launcher.
        free_kb: KiB left on its disk.
        skew_s: Its clock less ours, in seconds.
    """

    node: int
    exit_code: int | None = None
    why: str = ""
    lost: str | None = None
    stopped: bool = False
    setup: SetupEvidence | None = None
    ranks: Sequence[RankEvidence] = ()
    log_tail: str = field(default="", repr=False)
    free_kb: int | None = None
    skew_s: float = 0.0

    @property
    def succeeded(self) -> bool:
        """Whether its job ended well."""
        return self.lost is None and self.exit_code == 0 and self.why in ("exit", "")

    @property
    def ended_by_us(self) -> bool:
        """Whether it was told to end."""
        return self.stopped or self.why == "cancelled"

    @property
    def outcome(self) -> str:
        """How it ended, as a value of `ExitCause`; ``stopped`` where another node was the cause."""
        if self.stopped and not self.succeeded:
            return STOPPED
        failure = next(iter(_failures([self])), None)
        if failure is not None and failure.rank.end.lost_peer:
            return STOPPED
        return diagnose([self]).cause.value


def diagnose(nodes: Sequence[NodeEvidence], *, stop: ExitCause | None = None) -> Diagnosis:
    """Find out why a job ended.

    Args:
        nodes: What each of its nodes left.
        stop: Why gpu-flows stopped it: deadline, budget, cancelled; None when it did not.
    """
    if nodes and all(node.succeeded for node in nodes):
        return Diagnosis(cause=ExitCause.SUCCEEDED, sentence="the training succeeded", exit_code=0)
    several = len(nodes) > 1
    by_themselves = [node for node in nodes if not node.ended_by_us]
    first = next(iter(_failures(by_themselves)), None)
    own_failure = first is not None and not first.is_consequence
    if stop is not None and not own_failure and not any(map(_setup_failed, by_themselves)):
        return Diagnosis(cause=stop, sentence=_STOPS.get(stop, f"the job was stopped: {stop}"))
    lost = next((node for node in nodes if node.lost is not None), None)
    if lost is not None and not own_failure:
        sentence = f"the box of node {lost.node} was lost: {lost.lost}"
        return Diagnosis(cause=ExitCause.PREEMPTED, sentence=sentence, node=lost.node)
    unready = next((node for node in by_themselves if _setup_failed(node)), None)
    if unready is not None:
        return _of_setup(unready, several)
    if first is not None:
        return _of_rank(first, several)
    failed = next((node for node in by_themselves if not node.succeeded), None)
    if failed is not None:
        return _of_node(failed, several)
    if all(node.why == "cancelled" or node.succeeded for node in nodes) and nodes:
        return Diagnosis(cause=ExitCause.CANCELLED, sentence=_STOPS[ExitCause.CANCELLED])
    return Diagnosis(cause=ExitCause.UNKNOWN, sentence="the job ended, and nothing says why")


_STOPS = {
    ExitCause.DEADLINE: "the job was stopped at its max_duration",
    ExitCause.BUDGET: "the job was stopped because its max_cost was spent",
    ExitCause.CANCELLED: "the job was cancelled",
}


@dataclass(frozen=True, slots=True)
class _Failure:
    """A rank that failed, and whether something else made it fail."""

    node: NodeEvidence
    rank: RankEvidence

    @property
    def is_consequence(self) -> bool:
        return self.rank.exit_code == _TERM or self.rank.end.lost_peer

    @property
    def order(self) -> tuple[bool, bool, float, int]:
        """What fails by itself before what fails with it; the earliest first, by one clock for all nodes."""
        skew_s = self.node.skew_s if abs(self.node.skew_s) > _TRUSTED_SKEW_S else 0.0
        at = self.rank.ended_ms - 1000 * skew_s
        return self.rank.exit_code == _TERM, self.rank.end.lost_peer, at, self.rank.rank


def _failures(nodes: Sequence[NodeEvidence]) -> list[_Failure]:
    found = (_Failure(node, rank) for node in nodes for rank in node.ranks if rank.exit_code not in (0, None))
    return sorted(found, key=lambda failure: failure.order)


def _setup_failed(node: NodeEvidence) -> bool:
    return node.lost is None and node.setup is not None and node.setup.exit_code != 0


def _of_setup(node: NodeEvidence, several: bool) -> Diagnosis:
    setup = node.setup or SetupEvidence(None)
    where = f" on node {node.node}" if several else ""
    if setup.number:
        what = f"setup command {setup.number} of {setup.total} failed{where} with exit code {setup.exit_code}"
    elif setup.exit_code is None:
        what = f"the setup{where} ended early"
    else:
        what = f"the box{f' of node {node.node}' if several else ''} is not ready to train"
    said = read_log_end(node.log_tail).last_line.removeprefix("gpu-flows: ")
    return Diagnosis(
        cause=ExitCause.SETUP_FAILED,
        sentence=f"{what}: {said}" if said else what,
        node=node.node,
        exit_code=setup.exit_code if setup.exit_code is not None else node.exit_code,
    )


def _of_rank(failure: _Failure, several: bool) -> Diagnosis:
    node, rank, end = failure.node, failure.rank, failure.rank.end
    cause = end.cause or ExitCause.SCRIPT_ERROR
    killed = rank.by_signal and rank.exit_code == _KILL
    if node.why == "oom" and (killed or (end.cause is None and rank.by_signal)):
        cause = ExitCause.HOST_OOM
    elif end.cause is None and (killed or failure.is_consequence):
        cause = ExitCause.UNKNOWN
    elif end.cause is None and node.free_kb is not None and node.free_kb < _FULL_KB:
        cause = ExitCause.DISK_FULL
    return Diagnosis(
        cause=cause,
        sentence=_sentence(failure, cause, several),
        node=node.node,
        rank=rank.rank,
        exit_code=rank.exit_code,
        traceback=end.traceback,
        port_taken=cause is ExitCause.RENDEZVOUS_FAILED and end.port_taken,
    )


def _sentence(failure: _Failure, cause: ExitCause, several: bool) -> str:
    rank, end = failure.rank, failure.rank.end
    who = f"rank {rank.rank}" + (f" on node {failure.node.node}" if several else "")
    code = rank.exit_code or 0
    ended = f"was ended by {_signal_name(code - 128)}" if rank.by_signal else f"exited with code {code}"
    said = end.exception + (f" ({end.place})" if end.place else "") if end.exception else ""
    match cause:
        case ExitCause.HOST_OOM if rank.by_signal:
            return f"{who} was killed because the box was out of memory"
        case ExitCause.UNKNOWN if rank.exit_code == _KILL:
            return f"{who} was killed from outside (SIGKILL); most often the box is out of memory"
        case ExitCause.UNKNOWN if end.lost_peer:
            return f"{who} lost its connection to another rank, and no rank says why: {said}"
        case ExitCause.UNKNOWN:
            return f"{who} {ended} from outside"
    what = _WHAT.get(cause, ended)
    return f"{who} {what}: {said}" if said else f"{who} {what}"


_WHAT = {
    ExitCause.CUDA_OOM: "ran out of GPU memory",
    ExitCause.HOST_OOM: "ran out of memory",
    ExitCause.NCCL_TIMEOUT: "waited in vain for the other ranks in a collective",
    ExitCause.DISK_FULL: "found the disk full",
    ExitCause.RENDEZVOUS_FAILED: "did not find the other ranks",
}


def _of_node(node: NodeEvidence, several: bool) -> Diagnosis:
    """Judge a node none of whose ranks left a failure: they never started, or were killed with their records."""
    end = read_log_end(node.log_tail)
    cause = ExitCause.HOST_OOM if node.why == "oom" else end.cause or ExitCause.UNKNOWN
    who = f"node {node.node}" if several else "the job"
    code = "an unknown exit code" if node.exit_code is None else f"exit code {node.exit_code}"
    said = end.exception or end.last_line
    what = {
        ExitCause.RENDEZVOUS_FAILED: "did not find the other nodes",
        ExitCause.HOST_OOM: "was killed because the box was out of memory",
    }.get(cause, f"ended with {code}")
    return Diagnosis(
        cause=cause,
        sentence=f"{who} {what}: {said}" if said else f"{who} {what}",
        node=node.node,
        exit_code=node.exit_code,
        traceback=end.traceback,
        port_taken=cause is ExitCause.RENDEZVOUS_FAILED and end.port_taken,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
