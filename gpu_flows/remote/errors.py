"""What can go wrong between here and a box, told apart by what to do about it."""

from __future__ import annotations

from typing import ClassVar

from gpu_flows.errors import BadRequest, DeadlineExceeded, GpuFlowsError


class SshError(GpuFlowsError):
    """Something between here and a box failed.

    Attributes:
        retryable: Whether the same call may well succeed a little later.
    """

    code = "SSH"
    retryable: ClassVar[bool] = False


class SshUnreachable(SshError):
    """Nothing that speaks SSH answers: refused, timed out, no route, unknown name, thrown out while busy."""

    code = "SSH_UNREACHABLE"
    retryable = True


class SshDropped(SshUnreachable):
    """The connection was lost while a command ran; the command may have run, in part or wholly."""

    code = "SSH_DROPPED"


class SshAuthenticationFailed(SshError):
    """The box answers but does not accept our key for this user."""

    code = "SSH_AUTHENTICATION_FAILED"


class HostKeyChanged(SshError):
    """The box shows another host key than at the first contact; nothing was sent to it."""

    code = "HOST_KEY_CHANGED"


class RemoteTimeout(SshError, DeadlineExceeded):
    """The box was reached, but the command did not end by its deadline."""

    code = "REMOTE_TIMEOUT"


class RemoteScriptFailed(SshError):
    """A script on the box failed, or its reply cannot be told from noise.

    Args:
        message: What failed and what it means.
        exit_status: Exit status of the script; -1 when a signal ended it.
        stderr: What it wrote to stderr.
        hint: What to do.
    """

    code = "REMOTE_SCRIPT_FAILED"

    def __init__(self, message: str, *, exit_status: int, stderr: bytes, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.exit_status = exit_status
        self.stderr = stderr


class OutputTooLarge(SshError):
    """A reply grew beyond what is kept in memory."""

    code = "OUTPUT_TOO_LARGE"


class UnwantedArchive(SshError):
    """A box sent something that it was not asked for; nothing of that was written."""

    code = "UNWANTED_ARCHIVE"


class FetchTooLarge(SshError):
    """There is no room here for what a box has."""

    code = "FETCH_TOO_LARGE"


class CannotWrite(SshError):
    """A file from a box cannot be written on this machine."""

    code = "CANNOT_WRITE"


class CodeChanged(GpuFlowsError):
    """A file was changed between being hashed and being sent."""

    code = "CODE_CHANGED"


class BadKey(BadRequest):
    """A private key that cannot be used; found out before anything is rented."""

    code = "BAD_KEY"
