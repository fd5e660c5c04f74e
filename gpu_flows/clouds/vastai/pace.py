"""Not asking more often than a cloud allows."""

from __future__ import annotations

import threading
from collections import deque

from gpu_flows.clock import Clock


class Pace:
    """So many calls within a time, the next one waits; shared by the threads of a process.

    Args:
        calls: How many.
        window_s: Within how many seconds.
        clock: Time and sleep.
    """

    def __init__(self, calls: int, window_s: float, clock: Clock) -> None:
        self._window_s = window_s
        self._clock = clock
        self._lock = threading.Lock()
        self._taken: deque[float] = deque(maxlen=calls)

    def wait(self) -> None:
        """Wait for one's turn, at most one window for each caller ahead."""
        with self._lock:  # held while waiting: the others would have to wait longer
            if len(self._taken) == self._taken.maxlen:
                left_s = self._taken[0] + self._window_s - self._clock.monotonic()
                if left_s > 0:
                    self._clock.sleep(left_s)
            self._taken.append(self._clock.monotonic())
