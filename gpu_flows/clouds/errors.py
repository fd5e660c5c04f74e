"""One taxonomy for every cloud: what failed, and how far it reaches.

A cloud turns its answers into these errors by a table of `Verdict` rows; the failover loop knows only
the error's scope and whether a box may exist in spite of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from gpu_flows.errors import GpuFlowsError


class Scope(StrEnum):
    """What is not worth asking again after an error."""

    CALL = "call"
    """Only this call: back off and repeat it where that is safe."""
    OFFER = "offer"
    """This offer; the next one may do."""
    ZONE = "zone"
    """Every offer of this zone."""
    REGION = "region"
    """Every offer of this region."""
    FAMILY = "family"
    """This GPU model in this region (a quota bucket)."""
    CLOUD = "cloud"
    """Every offer of this account of this cloud."""
    REQUEST = "request"
    """Everything: no cloud will answer the request differently."""


class CloudError(GpuFlowsError):
    """A cloud did not do what was asked.

    Args:
        message: What failed and what it means.
        hint: What to do about it.
        scope: How far it reaches; the class has a default.
        ambiguous: True where the box may exist although the call failed, so that it must be looked for.
        box_ids: Ids of boxes that the failing answer itself mentions; they are destroyed first.
        retry_after_s: How long the cloud asks to wait.
        answer: The cloud's own words, shortened and without secrets.
    """

    code: ClassVar[str] = "CLOUD_ERROR"
    default_scope: ClassVar[Scope] = Scope.OFFER
    default_ambiguous: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        scope: Scope | None = None,
        ambiguous: bool | None = None,
        box_ids: Sequence[str] = (),
        retry_after_s: float | None = None,
        answer: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.scope = self.default_scope if scope is None else scope
        self.ambiguous = self.default_ambiguous if ambiguous is None else ambiguous
        self.box_ids = tuple(box_ids)
        self.retry_after_s = retry_after_s
        self.answer = answer


class CapacityUnavailable(CloudError):
    """The cloud has no such box now."""

    code = "CAPACITY_UNAVAILABLE"


class QuotaExceeded(CloudError):
    """The account may not rent more of this."""

    code = "QUOTA_EXCEEDED"
    default_scope = Scope.FAMILY


class AuthenticationFailed(CloudError):
    """The credentials are missing, wrong, expired, or not allowed to do this."""

    code = "AUTHENTICATION_FAILED"
    default_scope = Scope.CLOUD


class OutOfBalance(CloudError):
    """The account has no money left."""

    code = "OUT_OF_BALANCE"
    default_scope = Scope.CLOUD


class RequestRefused(CloudError):
    """The cloud says that the request itself is wrong."""

    code = "REQUEST_REFUSED"
    default_scope = Scope.REQUEST


class NotOffered(CloudError):
    """The cloud can never give this (spot, a count, CPU only); another one may."""

    code = "NOT_OFFERED"
    default_scope = Scope.CLOUD


class RateLimited(CloudError):
    """The cloud asks for fewer calls; nothing was created."""

    code = "RATE_LIMITED"
    default_scope = Scope.CALL


class CloudUnreachable(CloudError):
    """No answer: a timeout, a reset, a 5xx. A create may have gone through."""

    code = "CLOUD_UNREACHABLE"
    default_scope = Scope.OFFER
    default_ambiguous = True


class UnexpectedAnswer(CloudError):
    """An answer of a shape that the adapter does not know: it is "unknown", never "none"."""

    code = "UNEXPECTED_ANSWER"
    default_ambiguous = True


class PriceTooHigh(CloudError):
    """The box that was given costs more than the cap.

    Args:
        message: As for every error.
        usd_per_hour: What it costs, dollars per hour.
    """

    code = "PRICE_TOO_HIGH"

    def __init__(self, message: str, *, usd_per_hour: float) -> None:
        super().__init__(message)
        self.usd_per_hour = usd_per_hour


class BoxLost(CloudError):
    """The box ended, or was taken away, while it was still wanted."""

    code = "BOX_LOST"


class BoxNotReady(CloudError):
    """The box did not answer SSH within its deadline."""

    code = "BOX_NOT_READY"


class BoxCheckFailed(CloudError):
    """The box answers, but is not what was promised."""

    code = "BOX_CHECK_FAILED"


class SuspectedLeak(CloudError):
    """A box may be billing that cannot be proven to be ours; a person has to look."""

    code = "SUSPECTED_LEAK"
    default_scope = Scope.CLOUD


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one failure signature of a cloud means.

    Attributes:
        error: The error to raise.
        status: HTTP status it applies to; None for any.
        code: The cloud's machine-readable error code, or the stem of one.
        contains: Text that must occur in the answer, in any case.
        scope: Overrides the error's own scope.
        ambiguous: Overrides whether a box may exist in spite of it.
        hint: What the user can do.
    """

    error: type[CloudError]
    status: int | None = None
    code: str | None = None
    contains: str | None = None
    scope: Scope | None = None
    ambiguous: bool | None = None
    hint: str | None = None

    def matches(self, *, status: int | None, code: str | None, text: str) -> bool:
        """Tell whether an answer carries this signature."""
        if self.status is not None and self.status != status:
            return False
        if self.code is not None and not (code or "").startswith(self.code):
            return False
        return self.contains is None or self.contains.lower() in text.lower()


def verdict_of(
    verdicts: Sequence[Verdict], *, status: int | None = None, code: str | None = None, text: str = ""
) -> Verdict | None:
    """Return the first verdict whose signature the answer carries, or None when it is an unknown one."""
    return next((v for v in verdicts if v.matches(status=status, code=code, text=text)), None)
