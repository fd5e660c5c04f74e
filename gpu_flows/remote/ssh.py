"""One box over SSH: one connection, made on first use and made again when it is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from gpu_flows.endpoint import SshEndpoint
from gpu_flows.remote import framing
from gpu_flows.remote.channel import WINDOW_BYTES, Channel
from gpu_flows.remote.connect import ConnectOptions, Login, log_in
from gpu_flows.remote.errors import (
    OutputTooLarge,
    RemoteScriptFailed,
    RemoteTimeout,
    SshAuthenticationFailed,
    SshDropped,
    SshUnreachable,
)

__all__ = ["Backoff", "Completed", "RemoteBox", "polite_backoff"]

Stdin = bytes | AsyncIterable[bytes] | None
Backoff = Callable[[int], float]
"""Seconds to wait after the n-th failed attempt (from 1)."""

CHANNELS_AT_ONCE = 6
"""Stock sshd allows ten sessions a connection; the rest is left to a person who looks in."""

_QUIET_S = 0.3
"""How long nothing must come before output counts as complete while a background child holds it open."""
_SETTLE_S = 5.0
_CLOSE_S = 2.0
_OUTPUT_LIMIT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Completed:
    """What came of a command.

    Attributes:
        exit_status: Exit status of the main process; -1 when a signal ended it.
        exit_signal: Name of that signal without SIG, such as ``"KILL"``. A shell that is not replaced by the
            command reports 128 + n as its own status instead.
        stdout: All it wrote there, byte for byte, and whatever the login shell's rc files print.
        stderr: All it wrote there.
    """

    exit_status: int
    exit_signal: str | None
    stdout: bytes
    stderr: bytes


def polite_backoff(failures: int) -> float:
    """Wait 5 to 15 s: OpenSSH 9.8 and newer penalise an address that fails again quickly."""
    return min(15.0, 5.0 + 1.5 * (failures - 1)) + random.uniform(0, 1)  # noqa: S311 - spreads load


def _loopback_backoff(failures: int) -> float:
    return min(2.0, 0.1 * failures)


class RemoteBox:
    """One box over SSH: one connection, made on first use, again when lost; few channels at once.

    A box belongs to the event loop that first used it. No command gets a terminal, so what it detached lives
    on when the connection is lost.

    Args:
        endpoint: Where the box answers; a host key in it is compared, a missing one is pinned.
        private_key: The private key as text, normalised (`gpu_flows.remote.keys`).
        connect_timeout_s: Until TCP is up.
        login_timeout_s: From there until logged in.
        keepalive_s: Between questions to a silent peer; lost after `keepalive_count` unanswered ones.
        keepalive_count: See there.
        channels: Commands at once; more wait for their turn.
    """

    def __init__(
        self,
        endpoint: SshEndpoint,
        private_key: str,
        *,
        connect_timeout_s: float = 15,
        login_timeout_s: float = 30,
        keepalive_s: float = 5,
        keepalive_count: int = 3,
        channels: int = CHANNELS_AT_ONCE,
    ) -> None:
        self._endpoint = endpoint
        self._private_key = private_key
        self._options = ConnectOptions(
            connect_timeout_s=connect_timeout_s,
            login_timeout_s=login_timeout_s,
            keepalive_s=keepalive_s,
            keepalive_count=keepalive_count,
        )
        self._slots = asyncio.Semaphore(channels)
        self._connecting = asyncio.Lock()
        self._login: Login | None = None
        self._open = 0
        self._released = asyncio.Event()

    @property
    def endpoint(self) -> SshEndpoint:
        """Where the box answers, with the host keys that are pinned so far."""
        return self._endpoint

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; a later call would make a new one."""
        login, self._login = self._login, None
        if login is not None:
            await login.close(_CLOSE_S)

    async def run(self, command: str, *, stdin: Stdin = None, timeout_s: float) -> Completed:
        """Run a command line in the user's login shell until its main process ends.

        It ends with the main process even if a background child holds its stdout open (C37).

        Args:
            command: The command line; it shows in the box's process list, so it never holds a secret.
            stdin: What the command reads; sent in chunks, no faster than it reads.
            timeout_s: For all of it, connecting included.

        Raises:
            SshUnreachable: No connection; nothing ran.
            SshDropped: The connection was lost meanwhile; the command may have run.
            RemoteTimeout: The command did not end in time; it was asked to terminate.
        """
        channel = await self._finished(command, stdin, timeout_s, lambda _stdout: True)
        assert channel.exit_status is not None  # noqa: S101 - _finished guarantees it
        return Completed(channel.exit_status, channel.exit_signal, channel.stdout, channel.stderr)

    async def script(self, text: str, *args: str, stdin: Stdin = None, timeout_s: float) -> bytes:
        """Run POSIX sh text and return exactly what it wrote to stdout.

        Args:
            text: The script; at most about 90 KiB together with its arguments, and never a secret.
            *args: Its positional parameters, passed byte for byte.
            stdin: What it reads.
            timeout_s: For all of it, connecting included.

        Raises:
            RemoteScriptFailed: It ended with another status than 0, or its shell did not run at all.
            SshError: As for `run`.
        """
        nonce = framing.new_nonce()
        command = framing.framed_command(nonce, text, args)
        channel = await self._finished(
            command, stdin, timeout_s, lambda stdout: framing.find_reply(nonce, stdout) is not None
        )
        reply = framing.find_reply(nonce, channel.stdout)
        stderr = framing.after_begin(nonce, channel.stderr)
        if reply is None:
            raise self._script_failed("could not be run", channel.exit_status, stderr or channel.stdout)
        if reply.exit_status != 0:
            raise self._script_failed("failed", reply.exit_status, stderr)
        return reply.stdout

    async def stream(
        self, text: str, *args: str, stdin: Stdin = None, timeout_s: float
    ) -> AsyncIterator[bytes]:
        """Run POSIX sh text and yield its stdout as it comes, raw, in chunks of up to 256 KiB.

        Close the iterator (`contextlib.aclosing`) when leaving it early: that ends the script.

        Args:
            text: The script, as for `script`.
            *args: Its positional parameters.
            stdin: What it reads.
            timeout_s: Until its end, connecting included.

        Raises:
            RemoteScriptFailed: After the last chunk, when it ended with another status than 0.
            SshError: As for `run`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        nonce = framing.new_nonce()
        begin = framing.begin_line(nonce)
        channel = Channel(streaming=True)
        async with self._running(channel, framing.streamed_command(nonce, text, args), deadline, timeout_s):
            feeding = asyncio.ensure_future(channel.feed(stdin))
            try:
                head: bytes | None = b""
                while True:
                    async with self._deadline(channel, deadline, timeout_s):
                        chunk = await channel.read(_QUIET_S)
                    if not chunk:
                        break
                    if head is not None:
                        head += chunk
                        _, line, chunk = head.partition(begin)
                        if not line:
                            continue
                        head = None
                    if chunk:
                        yield chunk
                if feeding.done():
                    feeding.result()
            finally:
                await _cancelled(feeding)
        self._raise_if_lost(channel)
        if head is not None:
            raise self._script_failed("could not be run", channel.exit_status, channel.stderr or head)
        if channel.exit_status != 0:
            raise self._script_failed("failed", channel.exit_status, channel.stderr)

    async def wait_until_reachable(self, *, deadline_s: float, backoff: Backoff | None = None) -> None:
        """Log in, again and again, until it works: a new box takes minutes to answer.

        A refused key is tried again too, since sshd often starts before the key is installed.

        Args:
            deadline_s: How long to go on.
            backoff: Pauses between attempts; by default 5 s and more, shorter on loopback.

        Raises:
            SshUnreachable: It did not answer in time; the last cause is chained.
            SshAuthenticationFailed: It answered, but did not accept the key in time.
            HostKeyChanged: At once.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        pause = backoff or (_loopback_backoff if self._is_loopback() else polite_backoff)
        failures = 0
        last: SshUnreachable | SshAuthenticationFailed | None = None
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._connection()
                return
            except (SshUnreachable, SshAuthenticationFailed) as exc:
                last = exc
            except TimeoutError:
                last = last or SshUnreachable(f"{self._name()} did not answer")
            failures += 1
            wait_s = pause(failures)
            if loop.time() + wait_s >= deadline:
                raise type(last)(
                    f"gave up after {deadline_s:g} s and {failures} attempts: {last.message}", hint=last.hint
                ) from last
            await asyncio.sleep(wait_s)

    # One command, from a free slot to its end.

    async def _finished(
        self, command: str, stdin: Stdin, timeout_s: float, complete: Callable[[bytes], bool]
    ) -> Channel:
        """Run a command to its end, and return the channel with everything it wrote."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        channel = Channel(limit_bytes=_OUTPUT_LIMIT_BYTES)
        async with self._running(channel, command, deadline, timeout_s):
            feeding = asyncio.ensure_future(channel.feed(stdin))
            try:
                async with self._deadline(channel, deadline, timeout_s):
                    exited = asyncio.ensure_future(channel.exited.wait())
                    await asyncio.wait({feeding, exited}, return_when=asyncio.FIRST_COMPLETED)
                    if feeding.done():
                        feeding.result()
                    await exited
                    await self._settled(channel, complete)
            finally:
                await _cancelled(feeding)
        if channel.overflowed:
            raise OutputTooLarge(
                f"a command on {self._name()} wrote more than {_OUTPUT_LIMIT_BYTES >> 20} MiB; it was ended"
            )
        self._raise_if_lost(channel)
        return channel

    async def _settled(self, channel: Channel, complete: Callable[[bytes], bool]) -> None:
        try:
            async with asyncio.timeout(_SETTLE_S):
                await channel.settle(_QUIET_S, lambda: complete(channel.stdout))
        except TimeoutError:
            pass  # a background child that never stops writing; the main process has ended

    @asynccontextmanager
    async def _running(
        self, channel: Channel, command: str, deadline: float, timeout_s: float
    ) -> AsyncIterator[None]:
        """Hold a slot, start the command on the channel, and close the channel in the end."""
        async with self._deadline(channel, deadline, timeout_s):
            await self._slots.acquire()
        try:
            try:
                async with self._deadline(channel, deadline, timeout_s):
                    await self._start(channel, command)
                yield
            finally:
                channel.abandon(terminate=True)
        finally:
            self._slots.release()

    async def _start(self, channel: Channel, command: str) -> None:
        import asyncssh

        for attempt in (1, 2):
            connection = await self._connection()
            try:
                await connection.create_session(lambda: channel, command, encoding=None, window=WINDOW_BYTES)
                return
            except (OSError, asyncssh.Error) as exc:
                if channel.opened:
                    raise SshDropped(f"{self._name()} was lost while it took a command: {exc}") from exc
                # Never opened, so nothing ran: a dead connection, or one that has run out of sessions.
                await self._forget(connection)
                if attempt == 2:
                    raise SshUnreachable(f"{self._name()} does not open another session: {exc}") from exc

    async def _connection(self) -> Any:
        async with self._connecting:
            if self._login is None or not self._login.alive:
                import asyncssh

                key = asyncssh.import_private_key(self._private_key)
                self._login = await log_in(self._endpoint, key, self._options)
                self._endpoint = self._login.endpoint
            return self._login.connection

    async def _forget(self, connection: Any) -> None:
        if self._login is not None and self._login.connection is connection:
            login, self._login = self._login, None
            login.abort()

    @asynccontextmanager
    async def _deadline(self, channel: Channel, deadline: float, timeout_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except TimeoutError as exc:
            if channel.opened:
                raise RemoteTimeout(f"a command on {self._name()} ran for more than {timeout_s:g} s") from exc
            raise SshUnreachable(f"{self._name()} did not take a command within {timeout_s:g} s") from exc

    def _raise_if_lost(self, channel: Channel) -> None:
        if channel.exit_status is None:
            raise SshDropped(f"{self._name()} was lost while a command ran: {channel.lost}") from channel.lost

    def _script_failed(self, what: str, exit_status: int | None, output: bytes) -> RemoteScriptFailed:
        status = -1 if exit_status is None else exit_status
        tail = output[-2000:].decode(errors="replace").strip()
        return RemoteScriptFailed(
            f"a script on {self._name()} {what} with exit status {status}: {tail or 'it said nothing'}",
            exit_status=status,
            stderr=output,
        )

    def _name(self) -> str:
        return f"{self._endpoint.username}@{self._endpoint.host}:{self._endpoint.port}"

    def _is_loopback(self) -> bool:
        return self._endpoint.host in ("localhost", "::1") or self._endpoint.host.startswith("127.")


async def _cancelled(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # retrieved: whoever waited for it has seen it
