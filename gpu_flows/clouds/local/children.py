"""Children of the server's process, and the pipes that lead to them, without blocking its loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from typing import IO, Any

CHUNK_BYTES = 256 << 10


class Children:
    """The children of the server's process, reaped as they end: its own, and orphans that it has adopted.

    A child outlives the connection that asked for it, so nothing here ever kills one. (asyncio's own
    subprocesses are killed when their transport is closed.)

    Args:
        loop: The running loop; it must be the main thread's, for SIGCHLD.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._own: dict[int, tuple[subprocess.Popen[bytes], asyncio.Future[int]]] = {}
        loop.add_signal_handler(signal.SIGCHLD, self._reap)

    def watch(self, child: subprocess.Popen[bytes]) -> asyncio.Future[int]:
        """Wait for a child that was just started.

        Args:
            child: A child of this process.

        Returns:
            Its return code as `subprocess` gives it: negative for a signal.
        """
        ended: asyncio.Future[int] = self._loop.create_future()
        self._own[child.pid] = (child, ended)
        self._reap()
        return ended

    def _reap(self) -> None:
        # WNOWAIT: what has ended is looked at first, since a child of ours is for its Popen to reap.
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):  # no child is left at all
            while (status := os.waitid(os.P_ALL, 0, flags)) is not None:
                if status.si_pid not in self._own:
                    os.waitpid(status.si_pid, os.WNOHANG)
                    continue
                child, ended = self._own.pop(status.si_pid)
                ended.set_result(child.wait())


class Pipe:
    """A pipe or terminal without blocking.

    The transports of asyncio are not used: up to Python 3.11 at least, their end-of-file overtakes bytes
    that were written while the pipe was full.

    Args:
        file: Unbuffered; owned from now on.
    """

    def __init__(self, file: IO[bytes] | None) -> None:
        if file is None:
            raise ValueError("the process was started without this pipe")
        self.file = file
        os.set_blocking(file.fileno(), False)

    async def read(self) -> bytes:
        """Return the next bytes, or none at the end."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                return os.read(self.file.fileno(), CHUNK_BYTES)
            except BlockingIOError:
                await self._ready(loop.add_reader, loop.remove_reader)
            except OSError:  # a terminal that nobody holds any more reads as EIO
                return b""

    async def write(self, data: bytes) -> None:
        """Write all bytes.

        Raises:
            OSError: When nobody reads them.
        """
        loop = asyncio.get_running_loop()
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self.file.fileno(), rest) :]
            except BlockingIOError:
                await self._ready(loop.add_writer, loop.remove_writer)

    async def _ready(self, add: Callable[..., Any], remove: Callable[[int], Any]) -> None:
        ready = asyncio.Event()
        add(self.file.fileno(), ready.set)
        try:
            await ready.wait()
        finally:
            remove(self.file.fileno())

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.file.closed

    def close(self) -> None:
        """Close it; a second time is fine."""
        self.file.close()
