"""Calls that must not be torn in two: creating and destroying a box.

Signals reach Python's main thread as exceptions (KeyboardInterrupt, Prefect's TerminationSignal, what a
SIGTERM handler raises). Masking signals or swapping handlers does not hold them off; running the call in a
thread of its own and waiting it out does.
"""

from __future__ import annotations

import _thread
import contextvars
from collections.abc import Callable
from typing import Generic, TypeVar

from gpu_flows.leases.latch import Latch

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
        if not outcome.claimed_by("call"):
            return
        try:
            outcome.result.append(context.run(call))
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            outcome.failure = error
        finally:
            outcome.ended.open()

    interruption: BaseException | None = None
    # Two levels, since a second signal may come while the first one is being noted.
    try:
        try:
            # threading.Thread.start waits for an event, which a signal may break (see `Latch`). Like a daemon, this
            # thread ends with the process: a user who was told what is still alive may press Ctrl-C a third time.
            _thread.start_new_thread(work, ())
            outcome.ended.wait()
        except BaseException as error:  # noqa: BLE001 - raised below, once the call has ended
            interruption = error
            outcome.settle()
    except BaseException as error:  # noqa: BLE001 - likewise
        interruption = interruption or error
        outcome.settle()
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
        self.ended = Latch()
        self._claims: list[str] = []

    def claimed_by(self, who: str) -> bool:
        """Tell whether the call is in somebody's hands, who claims it if nobody has: whoever comes first decides."""
        self._claims.append(who)
        return self._claims[0] == who

    def settle(self) -> None:
        """Keep a call that has not begun from beginning; wait for the end of one that has."""
        if not self.claimed_by("caller"):
            self.ended.wait()
