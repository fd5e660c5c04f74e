"""One box over SSH: one connection, made on first use and made again when it is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from gpu_flows.endpoint import SshEndpoint
from gpu_flows.remote import framing
from gpu_flows.remote.channel import Channel
from gpu_flows.remote.connect import ConnectOptions, Login, is_loopback, log_in
from gpu_flows.remote.errors import (
    OutputTooLarge,
    RemoteScriptFailed,
    RemoteTimeout,
    SshAuthenticationFailed,
    SshDropped,
    SshUnreachable,
)
from gpu_flows.remote.keys import normalise_private_key

__all__ = ["Backoff", "Completed", "RemoteBox", "polite_backoff"]

Stdin = bytes | AsyncIterable[bytes] | None
Backoff = Callable[[int], float]
"""Seconds to wait after the n-th failed attempt (from 1)."""

CHANNELS_AT_ONCE = 6
"""Stock sshd allows ten sessions a connection; the rest is left to a person who looks in."""

_QUIET_S = 1.0
"""How long nothing must come, while a background child holds the output open, before it counts as complete: long
enough for TCP to send a lost packet again."""
_SETTLE_S = 10.0
"""How long a background child may go on writing before it is left to itself."""
_NOISE_LIMIT_BYTES = 1 << 20
"""How much a login shell may print before the script itself begins."""
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
        private_key: The private key as text; `gpu_flows.remote.keys` reads it, without a passphrase.
        earlier_keys: Keys that a box may have been made with before, tried after it.
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
        earlier_keys: Sequence[str] = (),
        connect_timeout_s: float = 15,
        login_timeout_s: float = 30,
        keepalive_s: float = 5,
        keepalive_count: int = 3,
        channels: int = CHANNELS_AT_ONCE,
    ) -> None:
        self._endpoint = endpoint
        self._private_keys = (private_key, *earlier_keys)
        self._keys: list[Any] = []
        self._options = ConnectOptions(
            connect_timeout_s=connect_timeout_s,
            login_timeout_s=login_timeout_s,
            keepalive_s=keepalive_s,
            keepalive_count=keepalive_count,
        )
        self._slots = asyncio.Semaphore(channels)
        self._channels: set[Channel] = set()
        self._one_ended = asyncio.Event()
        self._connecting = asyncio.Lock()
        self._login: Login | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

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
            RemoteTimeout: The command did not end in time. It may go on: OpenSSH passes our signal to no
                process of root's, so what waits on a box needs an end of its own.
        """
        channel = await self._finished(command, stdin, timeout_s, lambda _channel, calm: calm)
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

        def done(channel: Channel, calm: bool) -> bool:
            reply = framing.find_reply(nonce, channel.stdout)
            return reply is not None and (calm or reply.exit_status == 0)  # a failure wants all of stderr

        channel = await self._finished(framing.framed_command(nonce, text, args), stdin, timeout_s, done)
        reply = framing.find_reply(nonce, channel.stdout)
        stderr = framing.after_begin(nonce, channel.stderr)
        if reply is None:
            raise self._script_failed(channel, stderr or channel.stdout)
        if reply.exit_status != 0:
            raise self._script_failed(channel, stderr, reply.exit_status)
        return reply.stdout

    async def stream(
        self, text: str, *args: str, stdin: Stdin = None, timeout_s: float
    ) -> AsyncGenerator[bytes, None]:
        """Run POSIX sh text and yield its stdout as it comes, raw, in chunks of up to 256 KiB.

        Close the iterator (`contextlib.aclosing`) when leaving it early: that ends the script as soon as it
        writes. It ends by itself with the script, unless a background child goes on writing.

        Args:
            text: The script, as for `script`.
            *args: Its positional parameters.
            stdin: What it reads.
            timeout_s: Until its end, connecting included.

        Raises:
            RemoteScriptFailed: After the last chunk, when it ended with another status than 0.
            SshError: As for `run`.
        """
        deadline = _Deadline.after(timeout_s)
        nonce = framing.new_nonce()
        begin = framing.begin_line(nonce)
        head = b""
        begun = False
        command = framing.streamed_command(nonce, text, args)
        async with self._command(command, stdin, deadline, streaming=True) as channel:
            while True:
                async with self._not_beyond(deadline):
                    chunk = await channel.read(_QUIET_S)
                if not chunk:
                    break
                if not begun:
                    head += chunk
                    _, found, chunk = head.partition(begin)
                    begun = bool(found)
                    if not begun and len(head) > _NOISE_LIMIT_BYTES:
                        raise self._script_failed(channel, head)
                if begun and chunk:
                    yield chunk
        self._raise_what_cut_it(channel)
        if channel.exit_status != 0 or not begun:
            raise self._script_failed(channel, channel.stderr or head)

    async def wait_until_reachable(
        self, *, deadline_s: float, authentication_grace_s: float = 300, backoff: Backoff | None = None
    ) -> None:
        """Log in, again and again, until it works: a new box takes minutes to answer.

        A refused key is tried again too, since sshd often starts before the key is installed.

        Args:
            deadline_s: How long to go on.
            authentication_grace_s: How long to go on once a box answers and refuses the key.
            backoff: Pauses between attempts; by default 5 s and more, shorter on loopback.

        Raises:
            SshUnreachable: It did not answer in time; the last cause is chained.
            SshAuthenticationFailed: It answered, but did not accept the key in time.
            HostKeyChanged: At once.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        deadline = started + deadline_s
        pause = backoff or (_loopback_backoff if is_loopback(self._endpoint) else polite_backoff)
        failures = 0
        failure: SshUnreachable | SshAuthenticationFailed = SshUnreachable(f"{self._name()} does not answer")
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._logged_in()
                return
            except SshAuthenticationFailed as exc:
                failure = exc
                deadline = min(deadline, loop.time() + authentication_grace_s)
                authentication_grace_s = float("inf")  # counted from the first refusal
            except SshUnreachable as exc:
                failure = exc
            except TimeoutError:
                pass  # our own deadline cut the attempt short: the failure before it says more
            failures += 1
            wait_s = pause(failures)
            if loop.time() + wait_s >= deadline:
                raise type(failure)(
                    f"gave up after {loop.time() - started:.0f} s and {failures} attempts: {failure.message}",
                    hint=failure.hint,
                ) from failure
            await asyncio.sleep(wait_s)

    # One command, from a free slot to its end.

    async def _finished(
        self, command: str, stdin: Stdin, timeout_s: float, done: Callable[[Channel, bool], bool]
    ) -> Channel:
        """Run a command to its end, and return the channel with everything it wrote."""
        deadline = _Deadline.after(timeout_s)
        async with self._command(command, stdin, deadline) as channel, self._not_beyond(deadline):
            await channel.exited.wait()
            await channel.settle(_QUIET_S, _SETTLE_S, lambda calm: done(channel, calm))
        self._raise_what_cut_it(channel)
        return channel

    @asynccontextmanager
    async def _command(
        self, command: str, stdin: Stdin, deadline: _Deadline, *, streaming: bool = False
    ) -> AsyncIterator[Channel]:
        """Hold a slot, start the command, feed it its stdin meanwhile, and close its channel in the end."""
        try:
            async with asyncio.timeout_at(deadline.at):
                await self._slots.acquire()
        except TimeoutError as exc:
            raise self._not_taken(deadline) from exc
        try:
            channel = await self._start(command, deadline, streaming=streaming)
            feeding = asyncio.create_task(channel.feed(stdin))
            try:
                yield channel
            finally:
                self._close(channel)
                self._one_ended.set()
                feeding.cancel()
                await asyncio.wait({feeding})
        finally:
            self._slots.release()

    async def _start(self, command: str, deadline: _Deadline, *, streaming: bool) -> Channel:
        """Start a command, over a new connection if the one there is cannot take it."""
        import asyncssh

        reconnected = False
        while True:
            channel = Channel(streaming=streaming, limit_bytes=_OUTPUT_LIMIT_BYTES)
            self._channels.add(channel)
            self._one_ended.clear()
            started = False
            try:
                async with asyncio.timeout_at(deadline.at):
                    login = await self._logged_in()
                    await login.connection.create_session(
                        lambda channel=channel: channel, command, encoding=None, window=login.window_bytes
                    )
                started = True
                return channel
            except TimeoutError as exc:
                if channel.opened:
                    raise SshDropped(f"{self._name()} was handed a command and fell silent") from exc
                raise self._not_taken(deadline) from exc
            except (OSError, asyncssh.Error) as exc:
                alive = login.alive
                if channel.opened and not alive:
                    raise SshDropped(f"{self._name()} was lost while it took a command: {exc}") from exc
                if reconnected:
                    raise SshUnreachable(f"{self._name()} takes no more commands: {exc}") from exc
            finally:
                if not started:
                    self._close(channel)
            # It did not run: the box allows fewer sessions than we have, or the connection was dead already.
            if alive and any(other.opened for other in self._channels):
                await self._another_ended(deadline)
            else:
                reconnected = True
                self._forget(login)

    def _close(self, channel: Channel) -> None:
        channel.abandon()
        self._channels.discard(channel)

    async def _another_ended(self, deadline: _Deadline) -> None:
        try:
            async with asyncio.timeout_at(deadline.at):
                await self._one_ended.wait()
        except TimeoutError as exc:
            raise self._not_taken(deadline) from exc

    async def _logged_in(self) -> Login:
        """Return the connection, made again if it is lost; every caller waits for the same attempt."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise RuntimeError(f"the connection to {self._name()} belongs to another event loop")
        async with self._connecting:
            if self._login is None or not self._login.alive:
                self._login = await log_in(self._endpoint, self._loaded_keys(), self._options)
                self._endpoint = self._login.endpoint
            return self._login

    def _loaded_keys(self) -> list[Any]:
        if not self._keys:
            import asyncssh

            texts = (normalise_private_key(key, f"the key for {self._name()}") for key in self._private_keys)
            self._keys = [asyncssh.import_private_key(text) for text in texts]
        return self._keys

    def _forget(self, login: Login) -> None:
        login.abort()
        if self._login is login:
            self._login = None

    @asynccontextmanager
    async def _not_beyond(self, deadline: _Deadline) -> AsyncIterator[None]:
        """Bound a wait for a command that runs."""
        try:
            async with asyncio.timeout_at(deadline.at):
                yield
        except TimeoutError as exc:
            raise RemoteTimeout(
                f"a command on {self._name()} did not end within {deadline.seconds:g} s"
            ) from exc

    def _not_taken(self, deadline: _Deadline) -> SshUnreachable:
        return SshUnreachable(f"{self._name()} did not take a command within {deadline.seconds:g} s")

    def _raise_what_cut_it(self, channel: Channel) -> None:
        """Raise what ended a command before its own end."""
        if channel.feed_error is not None:
            raise channel.feed_error
        if channel.overflowed:
            raise OutputTooLarge(
                f"a command on {self._name()} wrote more than {_OUTPUT_LIMIT_BYTES >> 20} MiB and was ended"
            )
        if channel.exit_status is None:
            raise SshDropped(f"{self._name()} was lost while a command ran: {channel.lost}") from channel.lost

    def _script_failed(
        self, channel: Channel, output: bytes, exit_status: int | None = None
    ) -> RemoteScriptFailed:
        """Describe a failed script; without a status of its own, its shell did not get to the end."""
        status = channel.exit_status if exit_status is None else exit_status
        how = f"SIG{channel.exit_signal}" if channel.exit_signal else f"exit status {status}"
        said = output[-2000:].decode(errors="replace").strip() or "it said nothing"
        return RemoteScriptFailed(
            f"a script on {self._name()} failed with {how}: {said}",
            exit_status=-1 if status is None else status,
            stderr=output,
        )

    def _name(self) -> str:
        return f"{self._endpoint.username}@{self._endpoint.host}:{self._endpoint.port}"


@dataclass(frozen=True, slots=True)
class _Deadline:
    """A moment on the loop's clock, and how far away it was."""

    at: float
    seconds: float

    @classmethod
    def after(cls, seconds: float) -> _Deadline:
        return cls(asyncio.get_running_loop().time() + seconds, seconds)
