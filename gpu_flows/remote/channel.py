"""One command on an SSH connection: bytes in, bytes out, exit status, each with its own end.

This is the session object that asyncssh calls back. Its streams decode, cap at 2 MiB a window and wait for
the end of file; here bytes stay bytes, chunks stay large, and the exit of the main process is an event of its
own, because a background child may hold stdout open long after it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any

CHUNK_BYTES = 256 * 1024
_STDERR = 1  # SSH_EXTENDED_DATA_STDERR
_STREAM_BUFFER_BYTES = 4 << 20
_STREAM_STDERR_BYTES = 64 * 1024


class Channel:
    """The local end of one remote process.

    Args:
        streaming: Hold the sender back while nobody reads, and keep only the end of stderr. Without it
            everything is kept until the process has ended.
        limit_bytes: How much stdout and stderr may grow to, together, when not streaming.

    Attributes:
        opened: The server has accepted the channel; the command may have run.
        exited: The main process has ended.
        closed: Nothing more will come.
        overflowed: More than `limit_bytes` came; the process was asked to terminate.
        exit_status: Of the main process; -1 when a signal ended it, None while it runs or when it was lost.
        exit_signal: Name of that signal without SIG.
        lost: Why the connection ended, when it ended first.
        feed_error: What the source of stdin raised.
    """

    def __init__(self, *, streaming: bool = False, limit_bytes: int = 256 << 20) -> None:
        self._streaming = streaming
        self._limit_bytes = limit_bytes
        self._chan: Any = None
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._paused = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._readable = asyncio.Event()
        self._stderr = bytearray()
        self.received = 0
        self.opened = False
        self.exited = asyncio.Event()
        self.closed = asyncio.Event()
        self.overflowed = False
        self.exit_status: int | None = None
        self.exit_signal: str | None = None
        self.lost: Exception | None = None
        self.feed_error: Exception | None = None

    # What asyncssh calls.

    def connection_made(self, chan: Any) -> None:
        """The channel is open."""
        self.opened = True
        self._chan = chan

    def session_started(self) -> None:
        """The command was accepted."""

    def data_received(self, data: bytes, datatype: int | None) -> None:
        """Some output came."""
        self.received += len(data)
        if datatype == _STDERR:
            self._stderr += data
            if self._streaming and len(self._stderr) > 2 * _STREAM_STDERR_BYTES:
                del self._stderr[:-_STREAM_STDERR_BYTES]
        else:
            self._chunks.append(data)
            self._buffered += len(data)
            self._readable.set()
            if self._streaming and self._buffered > _STREAM_BUFFER_BYTES and not self._paused:
                self._paused = True
                self._chan.pause_reading()
        if not self._streaming and self._buffered + len(self._stderr) > self._limit_bytes:
            self.overflowed = True
            self._chunks.clear()
            self.abandon()

    def eof_received(self) -> bool:
        """No more output; keep our own direction open, the command may still read."""
        return True

    def exit_status_received(self, status: int) -> None:
        """The main process ended by itself."""
        self.exit_status = status
        self._end()

    def exit_signal_received(self, signal: str, _core_dumped: bool, _message: str, _lang: str) -> None:
        """The main process was ended by a signal."""
        self.exit_status = -1
        self.exit_signal = signal
        self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        """The channel is closed, or the connection under it is gone."""
        self.lost = exc
        self.closed.set()
        self._end()

    def pause_writing(self) -> None:
        """The window is full."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """The window has room again."""
        self._writable.set()

    def xon_xoff_requested(self, _client_can_do: bool) -> None:
        """Only terminals care."""

    def _end(self) -> None:
        self.exited.set()
        self._readable.set()
        self._writable.set()

    # What we call.

    async def feed(self, stdin: bytes | AsyncIterable[bytes] | None) -> None:
        """Send stdin to its end, no faster than the box takes it, and stop when the process has ended.

        A source that fails ends the process too, which would wait for the rest for ever.
        """
        try:
            async for chunk in _pieces(stdin):
                await self._writable.wait()
                if not self._write(chunk):
                    return
        except Exception as exc:  # noqa: BLE001 - whoever waits for the process raises it
            self.feed_error = exc
            self.abandon()
            return
        self._write(None)

    def _write(self, chunk: bytes | None) -> bool:
        """Write a chunk, or the end of file; return whether the process still listens."""
        if self.exited.is_set() or self._chan.is_closing():
            return False
        if chunk is None:
            self._chan.write_eof()
        else:
            self._chan.write(chunk)
        return True

    async def read(self, quiet_s: float) -> bytes:
        """Return the next output, as much as there is up to `CHUNK_BYTES`; empty at its end.

        After the exit the end is when the channel closes or nothing has come for `quiet_s`.
        """
        while not self._chunks:
            if self.closed.is_set():
                return b""
            self._readable.clear()
            try:
                async with asyncio.timeout(quiet_s if self.exited.is_set() else None):
                    await self._readable.wait()
            except TimeoutError:
                return b""
        return self._take()

    def _take(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        while self._chunks and (not parts or size + len(self._chunks[0]) <= CHUNK_BYTES):
            part = self._chunks.popleft()
            parts.append(part)
            size += len(part)
        self._buffered -= size
        if self._paused and self._buffered < _STREAM_BUFFER_BYTES // 2:
            self._paused = False
            self._chan.resume_reading()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def settle(self, quiet_s: float, most_s: float, done: Callable[[bool], bool]) -> None:
        """Wait, after the exit, until everything has come.

        Normally the channel closes at once. A background child may hold it open, and even write: then the wait
        ends when `done` says so.

        Args:
            quiet_s: How long nothing must come for the box to count as calm.
            most_s: After which it counts as calm even if something still comes.
            done: Told whether the box is calm; asked at once, and then every `quiet_s`.
        """
        loop = asyncio.get_running_loop()
        latest = loop.time() + most_s
        calm = False
        while not self.closed.is_set() and not done(calm):
            before = self.received
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(quiet_s):
                    await self.closed.wait()
            calm = self.received == before or loop.time() > latest

    @property
    def stdout(self) -> bytes:
        """All output that is kept."""
        if len(self._chunks) > 1:
            joined = b"".join(self._chunks)
            self._chunks.clear()
            self._chunks.append(joined)
        return self._chunks[0] if self._chunks else b""

    @property
    def stderr(self) -> bytes:
        """All of stderr that is kept."""
        return bytes(self._stderr)

    def abandon(self) -> None:
        """Close the channel without waiting for the box.

        A process that still runs is asked to terminate, which OpenSSH passes on unless the user is root; else it
        ends when it writes next.
        """
        if self._chan is None or self.closed.is_set():
            return
        if not self.exited.is_set():
            self._chan.terminate()
        self._chan.abort()


async def _pieces(stdin: bytes | AsyncIterable[bytes] | None) -> AsyncIterator[bytes]:
    """Cut the input so small that a loss of the connection is noticed between two pieces."""
    if stdin is None:
        return
    async for chunk in _once(stdin) if isinstance(stdin, bytes) else stdin:
        view = memoryview(chunk)
        for start in range(0, len(view), CHUNK_BYTES):
            yield bytes(view[start : start + CHUNK_BYTES])
            await asyncio.sleep(0)


async def _once(chunk: bytes) -> AsyncIterator[bytes]:
    yield chunk
