"""What the answers of Vast.ai mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu_flows.clouds.errors import (
    AuthenticationFailed,
    CapacityUnavailable,
    NotOffered,
    OutOfBalance,
    QuotaExceeded,
    RateLimited,
    RequestRefused,
    Scope,
    Verdict,
)

_KEY_HINT = "check the API key at https://cloud.vast.ai/manage-keys/"

VERDICTS = (
    # A wrong key is often a 404: only the field `error` tells it from a thing that is not there.
    Verdict(AuthenticationFailed, code="auth_error", hint=_KEY_HINT),
    Verdict(AuthenticationFailed, status=401, hint=_KEY_HINT),
    Verdict(
        NotOffered,
        status=403,
        contains="not your own",
        hint="an account that rents out machines can only rent its own: use another account",
    ),
    Verdict(AuthenticationFailed, status=403, hint=_KEY_HINT),
    Verdict(
        OutOfBalance, contains="insufficient_credit", hint="add credit at https://cloud.vast.ai/billing/"
    ),
    # 404, 410 and 400 have been seen; the code stands in `error` or in `msg`.
    Verdict(CapacityUnavailable, contains="no_such_ask"),
    # A bid that is too low has left a stopped instance behind, which bills its disk.
    Verdict(CapacityUnavailable, code="invalid_price", ambiguous=True),
    Verdict(
        QuotaExceeded,
        code="search_quota_exceeded",
        scope=Scope.CLOUD,
        hint="the daily quota of searches is used up until midnight UTC",
    ),
    Verdict(RateLimited, status=429),
    Verdict(RequestRefused, code="invalid_args", scope=Scope.OFFER),
    Verdict(RequestRefused, code="no_ssh_key_for_vm", scope=Scope.OFFER),
    # A refusal that nobody has seen before may have made an instance all the same.
    Verdict(RequestRefused, status=400, scope=Scope.OFFER, ambiguous=True),
)
"""Sources: the published specification, the vendor's SDK (``search_quota_exceeded``), and public issues."""

SECRET_FIELDS = ("instance_api_key", "jupyter_token")
"""Fields of answers that hold a key of one instance."""


def error_code(body: Any) -> str | None:
    """Return the machine-readable code of a failure."""
    code = body.get("error") if isinstance(body, dict) else None
    return code if isinstance(code, str) else None


def instances_in(body: Any) -> Sequence[str]:
    """Return the instance that a failure says to have made all the same."""
    contract = body.get("new_contract") if isinstance(body, dict) else None
    return (str(contract),) if is_id(contract) else ()


def is_id(value: Any) -> bool:
    """Tell whether a value is an id as Vast.ai gives them out: a positive whole number."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
