"""Several slow calls at once, every outcome kept."""

from __future__ import annotations

import _thread
import contextvars
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from gpu_flows.leases.latch import Latch
from gpu_flows.leases.shield import shielded

T = TypeVar("T")

MAX_CALLS_AT_ONCE = 32


def in_parallel(calls: Sequence[Callable[[], T]], *, interruptible: bool = False) -> list[T | Exception]:
    """Make every call, at most 32 at once, and wait for all of them.

    Args:
        calls: What to call; a single one is called in place.
        interruptible: Whether an interruption of the waiting thread (Ctrl-C) leaves the calls to themselves: for
            calls that only ask or wait. Otherwise it is raised when all calls have ended.

    Returns:
        For each call, in order, what it returned or the exception that it raised.
    """
    if len(calls) <= 1:
        return [_outcome(call) for call in calls]
    return _all(calls) if interruptible else shielded(partial(_all, calls))


def _outcome(call: Callable[[], T]) -> T | Exception:
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - handed to the caller as the outcome
        return error


def _all(calls: Sequence[Callable[[], T]]) -> list[T | Exception]:
    outcomes: dict[int, T | Exception] = {}
    fatal: list[BaseException] = []
    unfinished = len(calls)
    lock, all_ended = threading.Lock(), Latch()
    turns = threading.Semaphore(MAX_CALLS_AT_ONCE)

    def work(index: int, context: contextvars.Context) -> None:
        nonlocal unfinished
        try:
            with turns:
                outcomes[index] = context.run(_outcome, calls[index])
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            fatal.append(error)
        finally:
            with lock:
                unfinished -= 1
                last = not unfinished
            if last:
                all_ended.open()

    for index in range(len(calls)):
        # Not an executor's: its threads keep the process from ending until the last call has.
        _thread.start_new_thread(work, (index, contextvars.copy_context()))
    all_ended.wait()
    if fatal:
        raise fatal[0]
    return [outcomes[index] for index in range(len(calls))]
