"""Calls that must not be torn in two: creating and destroying a box.

Signals reach Python's main thread as exceptions (KeyboardInterrupt, Prefect's TerminationSignal, what a
SIGTERM handler raises). Masking signals or swapping handlers does not hold them off; running the call in a
thread of its own and waiting it out does.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


def shielded(call: Callable[[], T]) -> T:
    """Run a call to its end even if this thread is interrupted meanwhile, then let the interruption go on.

    Args:
        call: What must not be interrupted. It has a deadline of its own, and records its result itself:
            after an interruption nobody receives what it returns.

    Returns:
        What the call returned.

    Raises:
        BaseException: The interruption, once the call has ended; else what the call raised.
    """
    outcome = _Outcome[T]()
    context = contextvars.copy_context()

    def work() -> None:
        if not outcome.begins():
            return
        try:
            outcome.result.append(context.run(call))
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            outcome.failure = error
        finally:
            outcome.ended.set()

    interruption: BaseException | None = None
    try:
        # A daemon: a user who has been told what is still alive may end the process with a third Ctrl-C.
        threading.Thread(target=work, name="gpu-flows-shielded", daemon=True).start()
    except BaseException as error:
        # Whoever comes first decides: an interruption before the call has begun keeps it from beginning.
        if outcome.begins():
            raise
        interruption = error
    interruption = _wait_out(outcome.ended) or interruption
    if interruption is not None:
        raise interruption from outcome.failure
    if outcome.failure is not None:
        raise outcome.failure
    return outcome.result[0]


class _Outcome(Generic[T]):
    """What came of a call, written by its thread."""

    def __init__(self) -> None:
        self.result: list[T] = []
        self.failure: BaseException | None = None
        self.ended = threading.Event()
        self._claim = threading.Lock()

    def begins(self) -> bool:
        """Claim the call; True for the first to ask."""
        return self._claim.acquire(blocking=False)


def _wait_out(ended: threading.Event) -> BaseException | None:
    """Wait for the event whatever interrupts the waiting; return the first interruption."""
    interruption: BaseException | None = None
    while True:
        try:
            while True:
                try:
                    ended.wait()
                except BaseException as error:  # noqa: BLE001 - returned
                    interruption = interruption or error
                else:
                    return interruption
        except BaseException as error:  # noqa: BLE001 - one that came while another one was being noted
            interruption = interruption or error
