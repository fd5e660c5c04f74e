"""Something to wait for that a signal may interrupt at any instruction."""

from __future__ import annotations

import threading

_LOOK_AGAIN_S = 60.0


class Latch:
    """Closed until it is opened, once, by another thread; one thread waits for it.

    What a signal handler raises comes out of `wait` as it is. Out of `threading.Event.wait` a RuntimeError may
    come instead: its condition is written in Python, and a handler may run between any two of its instructions.
    """

    def __init__(self) -> None:
        self._opened = False
        self._lock = threading.Lock()
        self._lock.acquire()

    @property
    def is_open(self) -> bool:
        """Whether it was opened."""
        return self._opened

    def open(self) -> None:
        """Let the waiting thread go on."""
        self._opened = True
        self._lock.release()

    def wait(self) -> None:
        """Wait until it is opened."""
        # The flag decides: an interruption may have come after the lock was taken.
        while not self._opened:
            self._lock.acquire(timeout=_LOOK_AGAIN_S)
