"""Several slow calls at once, every outcome kept."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

MAX_CALLS_AT_ONCE = 32


def in_parallel(calls: Sequence[Callable[[], T]]) -> list[T | Exception]:
    """Make every call, at most 32 at once, and wait for all of them.

    Args:
        calls: What to call; a single one is called in place.

    Returns:
        For each call, in order, what it returned or the exception that it raised.
    """

    def outcome(call: Callable[[], T]) -> T | Exception:
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - handed to the caller as the outcome
            return error

    if len(calls) <= 1:
        return [outcome(call) for call in calls]
    with ThreadPoolExecutor(min(len(calls), MAX_CALLS_AT_ONCE), thread_name_prefix="gpu-flows") as pool:
        contexts = [contextvars.copy_context() for _ in calls]
        return list(pool.map(lambda pair: pair[0].run(outcome, pair[1]), zip(contexts, calls, strict=True)))
