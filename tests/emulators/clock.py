"""A clock that moves only when somebody sleeps or a test says so."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta


class FakeClock:
    def __init__(self, start: datetime = datetime(2026, 6, 1, 12, tzinfo=UTC)) -> None:
        self._now = start
        self._elapsed_s = 0.0
        self._lock = threading.Lock()
        self.slept: list[float] = []

    def now(self) -> datetime:
        with self._lock:
            return self._now

    def monotonic(self) -> float:
        with self._lock:
            return self._elapsed_s

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept.append(seconds)
        self.advance(max(seconds, 1e-6))

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._now += timedelta(seconds=seconds)
            self._elapsed_s += seconds

    def set_wall(self, now: datetime) -> None:
        """Jump the wall clock alone, as an administrator or NTP does."""
        with self._lock:
            self._now = now
