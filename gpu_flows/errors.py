"""The root of everything that gpu-flows raises on purpose.

Every message says what failed and what it means; ``hint`` says what to do. The cause is chained with
``raise ... from``. ``code`` is stable and machine-readable: reports, events and exit codes use it.
"""

from __future__ import annotations

from typing import ClassVar


class GpuFlowsError(Exception):
    """Something that gpu-flows could not do.

    Args:
        message: What failed and what it means, in one sentence.
        hint: What the user can do about it.
    """

    code: ClassVar[str] = "ERROR"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class BadRequest(GpuFlowsError, ValueError):
    """What the user asked for cannot be understood or can never be met; nothing was rented."""

    code = "BAD_REQUEST"


class SettingsError(BadRequest):
    """The installation's settings forbid it, are missing, or contradict each other."""

    code = "SETTINGS"


class MissingExtra(GpuFlowsError, ImportError):
    """An optional dependency is not installed.

    Args:
        package: The distribution that could not be imported.
        extra: The extra of gpu-flows that brings it.
    """

    code = "MISSING_EXTRA"

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed", hint=f"pip install 'gpu-flows[{extra}]'")
        self.package = package
        self.extra = extra


class DeadlineExceeded(GpuFlowsError, TimeoutError):
    """A wait ended at its deadline."""

    code = "DEADLINE_EXCEEDED"
