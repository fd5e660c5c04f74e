"""How a job ended: one value of `ExitCause`, told in a sentence, and raised as the exception of that name."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from gpu_flows.errors import GpuFlowsError


class ExitCause(StrEnum):
    """Why a job ended. Every cause but success has an exception whose ``code`` is the cause in capitals."""

    SUCCEEDED = "succeeded"
    SCRIPT_ERROR = "script_error"
    """The user's own code failed."""
    CUDA_OOM = "cuda_oom"
    """A GPU had not enough memory."""
    HOST_OOM = "host_oom"
    """The box had not enough memory."""
    NCCL_TIMEOUT = "nccl_timeout"
    """A collective (NCCL's or gloo's) waited in vain for a rank that was still there."""
    DISK_FULL = "disk_full"
    PREEMPTED = "preempted"
    """A box was lost: interrupted, rebooted, or destroyed by somebody else."""
    DEADLINE = "deadline"
    """Stopped by gpu-flows at ``max_duration``."""
    BUDGET = "budget"
    """Stopped by gpu-flows at ``max_cost``."""
    SETUP_FAILED = "setup_failed"
    """The box was not ready to train: a setup command failed, or there is no torch."""
    CANCELLED = "cancelled"
    """Stopped on request."""
    RENDEZVOUS_FAILED = "rendezvous_failed"
    """The ranks did not find each other."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Why a job ended, and what shows it.

    Attributes:
        cause: The cause.
        sentence: The same for people.
        node: Index of the node where it began; None when it was no node's doing.
        rank: Global rank where it began; None when it was no rank's doing.
        exit_code: Exit code of that rank, or of the node's job; 128 + n stands for signal n; None where nobody
            knows.
        traceback: The rank's own traceback; empty when it wrote none.
        port_taken: The rendezvous failed because its port was in use: another port will do.
    """

    cause: ExitCause
    sentence: str
    node: int | None = None
    rank: int | None = None
    exit_code: int | None = None
    traceback: str = ""
    port_taken: bool = False

    def error(self) -> TrainingError | None:
        """Return the exception for this end; None for a success."""
        kind = _ERRORS.get(self.cause)
        return kind(self) if kind else None

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as plain JSON values."""
        return {
            "cause": self.cause.value,
            "sentence": self.sentence,
            "node": self.node,
            "rank": self.rank,
            "exit_code": self.exit_code,
            "traceback": self.traceback,
        }


class TrainingError(GpuFlowsError):
    """A job did not end well.

    Args:
        diagnosis: Why.
    """

    code: ClassVar[str] = "TRAINING_FAILED"
    cause: ClassVar[ExitCause]
    advice: ClassVar[str | None] = None

    def __init__(self, diagnosis: Diagnosis) -> None:
        message = diagnosis.sentence
        super().__init__(
            f"{message}\n\n{diagnosis.traceback}" if diagnosis.traceback else message, hint=self.advice
        )
        self.diagnosis = diagnosis

    def __init_subclass__(cls) -> None:
        cls.code = cls.cause.value.upper()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.diagnosis,)


class ScriptFailed(TrainingError):
    """The user's own code failed."""

    cause = ExitCause.SCRIPT_ERROR


class GpuOutOfMemory(TrainingError):
    """A GPU had not enough memory."""

    cause = ExitCause.CUDA_OOM
    advice = "a smaller batch, gradient checkpointing, or a card with more memory: min_vram_gb"


class HostOutOfMemory(TrainingError):
    """The box had not enough memory."""

    cause = ExitCause.HOST_OOM
    advice = "fewer data workers, less data at once, or a larger box"


class CollectiveTimedOut(TrainingError):
    """A collective waited in vain for a rank that was still there."""

    cause = ExitCause.NCCL_TIMEOUT
    advice = "ranks that take different branches or unequal numbers of steps wait for each other for ever"


class DiskFull(TrainingError):
    """The disk of a box is full."""

    cause = ExitCause.DISK_FULL
    advice = "ask for a larger disk_gb, or keep fewer checkpoints"


class Preempted(TrainingError):
    """A box was lost before the job had ended."""

    cause = ExitCause.PREEMPTED
    advice = "the same run again rents another box"


class DeadlineReached(TrainingError):
    """The job was stopped at its max_duration."""

    cause = ExitCause.DEADLINE
    advice = "raise max_duration"


class BudgetReached(TrainingError):
    """The job was stopped because its max_cost was spent."""

    cause = ExitCause.BUDGET
    advice = "raise max_cost"


class SetupFailed(TrainingError):
    """The box was not ready to train."""

    cause = ExitCause.SETUP_FAILED


class Cancelled(TrainingError):
    """The job was stopped on request."""

    cause = ExitCause.CANCELLED


class RendezvousFailed(TrainingError):
    """The ranks did not find each other."""

    cause = ExitCause.RENDEZVOUS_FAILED


class UnknownEnd(TrainingError):
    """The job failed, and nothing on the box says why."""

    cause = ExitCause.UNKNOWN


_ERRORS = {kind.cause: kind for kind in TrainingError.__subclasses__()}
