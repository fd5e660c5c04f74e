"""Calls that must not be torn in two: creating and destroying a box.

Signals reach Python's main thread as exceptions (KeyboardInterrupt, Prefect's TerminationSignal, what a
SIGTERM handler raises). Masking signals or swapping handlers does not hold them off; running the call in a
thread of its own and waiting it out does.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

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
    result: list[T] = []
    failure: list[BaseException] = []
    ended = threading.Event()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            result.append(context.run(call))
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            failure.append(error)
        finally:
            ended.set()

    # A daemon: a third Ctrl-C of a user who has been told what is still alive may end the process.
    threading.Thread(target=work, name="gpu-flows-shielded", daemon=True).start()
    interruption: BaseException | None = None
    while not ended.is_set():
        try:
            ended.wait()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised below
            interruption = interruption or error
    if interruption is not None:
        raise interruption from (failure[0] if failure else None)
    if failure:
        raise failure[0]
    return result[0]
