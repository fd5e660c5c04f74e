"""Synchronous work beside the triggerer's event loop, in a thread of its own, with its log brought back."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

_CLEAN_UP_S = 8.0
"""The triggerer kills its process ten seconds after it was told to stop."""


class Beside:
    """Runs a function in a thread, hands out what it logs, and its result at the end.

    Airflow sorts log records into tasks by the coroutine that writes them, so a thread must not write its own.
    A thread of the loop's pool would do as well, but there are six of those on two cores, and a job is followed
    for hours.

    Args:
        work: What to run; it is given this object, whose methods are those of a logger.
        stop: Ends the work early; called from the loop's thread, returns at once.
    """

    def __init__(self, work: Callable[[Beside], Any], stop: Callable[[], None]) -> None:
        self._work, self._stop = work, stop
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue()
        self.result: Any = None
        self.failure: BaseException | None = None

    async def lines(self) -> AsyncGenerator[tuple[int, str], None]:
        """Start the work, and yield what it logs until it has ended.

        Cancelled, it stops the work and still yields nothing more: `drain` has the rest.
        """
        threading.Thread(target=self._run, name="gpu-flows-trigger", daemon=True).start()
        while (line := await self._queue.get()) is not None:
            yield line

    async def drain(self) -> list[tuple[int, str]]:
        """Stop the work, and return what it had logged and nobody has taken yet."""
        self._stop()
        left: list[tuple[int, str]] = []
        try:
            async with asyncio.timeout(_CLEAN_UP_S):
                while (line := await self._queue.get()) is not None:
                    left.append(line)
        except TimeoutError:
            left.append((logging.WARNING, "following did not end in time"))
        return left

    def log(self, level: int, message: str, *args: Any) -> None:
        """Take a record, from whatever thread."""
        self._put((level, message % args if args else message))

    def warning(self, message: str, *args: Any) -> None:
        """Take a warning."""
        self.log(logging.WARNING, message, *args)

    def info(self, message: str, *args: Any) -> None:
        """Take a notice."""
        self.log(logging.INFO, message, *args)

    def _run(self) -> None:
        try:
            self.result = self._work(self)
        except BaseException as error:  # noqa: BLE001 - it is the trigger's to judge
            self.failure = error
        finally:
            self._put(None)

    def _put(self, item: tuple[int, str] | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
