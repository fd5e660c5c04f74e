"""Answers that stay true for a while, asked for once however many threads want them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from gpu_flows.clock import Clock

V = TypeVar("V")


class Memo(Generic[V]):
    """Values by key, each made by the first who asks and kept for a time; a failure is not kept.

    Args:
        lifetime_s: How long a value is true.
        clock: Time.
    """

    def __init__(self, lifetime_s: float, clock: Clock) -> None:
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._values: dict[Hashable, tuple[float, V]] = {}
        self._locks: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """Return the value of a key, made where it is missing or too old."""
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            known = self._values.get(key)
            if known is None or self._clock.monotonic() - known[0] >= self._lifetime_s:
                known = self._values[key] = (self._clock.monotonic(), make())
            return known[1]

    def forget(self) -> None:
        """Forget every value."""
        with self._lock:
            self._values.clear()
