"""What an SSH session on a box runs: a command over pipes, or a shell on a terminal, as sshd would."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import termios
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncssh
from asyncssh.packet import Boolean, String, UInt32

from gpu_flows.clouds.local.children import CHUNK_BYTES, Children, Pipe

_SHELL = "/bin/sh"
_CANNOT_EXECUTE = 126
"""Exit status of a shell that cannot start a command."""
_INPUT_CHUNKS = 16
"""How many chunks of input may wait for the command before the client has to wait."""
_TERMINAL_DRAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Host:
    """The box that sessions run in.

    Attributes:
        environment: The whole environment of its processes.
        home: Where they start.
        children: Reaps them.
    """

    environment: Mapping[str, str]
    home: Path
    children: Children


class BoxServer(asyncssh.SSHServer):  # type: ignore[misc]  # the library is not looked into
    """Serves one connection to a box: sessions, and nothing else.

    Args:
        host: The box.
    """

    def __init__(self, host: Host) -> None:
        self._host = host

    def session_requested(self) -> _Session:
        """Open a session."""
        return _Session(self._host)


class _Session(asyncssh.SSHServerSession):  # type: ignore[misc]
    """One session: one command or shell, and what passes between it and the client."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._command: str | None = None
        self._terminal: str | None = None
        self._input: deque[bytes] = deque()
        self._input_ended = False
        self._input_paused = False
        self._input_changed = asyncio.Event()
        self._may_send = asyncio.Event()
        self._may_send.set()
        self._talking: asyncio.Task[None] | None = None

    # What the client asks for. Variables that it wants to set are not looked at, and subsystems refused.

    def connection_made(self, chan: Any) -> None:
        self._channel = chan

    def pty_requested(self, term_type: str, term_size: tuple[int, int, int, int], term_modes: Any) -> bool:
        self._terminal = term_type or "dumb"
        return True

    def shell_requested(self) -> bool:
        return True

    def exec_requested(self, command: str) -> bool:
        self._command = command
        return True

    def session_started(self) -> None:
        try:
            running = self._start_on_pipes() if self._terminal is None else self._start_on_terminal()
        except (OSError, ValueError) as error:  # too long a command, a NUL in it, no process to be had
            self._channel.write_stderr(f"cannot start the command: {error}\n".encode())
            self._channel.exit(_CANNOT_EXECUTE)
            return
        self._running = running
        self._ended = self._host.children.watch(running.child)
        self._talking = asyncio.ensure_future(self._talk())

    # What the client sends.

    def data_received(self, data: bytes, datatype: int | None) -> None:
        self._input.append(data)
        self._input_changed.set()
        if len(self._input) > _INPUT_CHUNKS and not self._input_paused:
            self._input_paused = True
            self._channel.pause_reading()

    def eof_received(self) -> bool:
        self._input_ended = True
        self._input_changed.set()
        return True  # the other direction stays open

    def signal_received(self, signal: str) -> None:
        number = _SIGNALS.get(signal)
        if number is not None and self._talking is not None and not self._ended.done():
            # To the whole group, as sshd does it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._running.child.pid, number)

    def terminal_size_changed(self, width: int, height: int, pixwidth: int, pixheight: int) -> None:
        if self._terminal is not None and self._talking is not None:
            termios.tcsetwinsize(self._running.stdin.file, (height, width))

    def pause_writing(self) -> None:
        self._may_send.clear()

    def resume_writing(self) -> None:
        self._may_send.set()

    def connection_lost(self, exc: Exception | None) -> None:
        # The command lives on; only its pipes are closed.
        if self._talking is not None:
            self._talking.cancel()

    # The command.

    def _start_on_pipes(self) -> _Running:
        child = subprocess.Popen(
            _arguments(self._command),
            executable=_SHELL,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=dict(self._host.environment),
            cwd=self._host.home,
            start_new_session=True,
        )
        running = _Running(child, Pipe(child.stdin), Pipe(child.stdout), Pipe(child.stderr))
        # Fewer, larger chunks; a user's share of large pipes may be used up, and small ones do as well.
        with contextlib.suppress(OSError):
            fcntl.fcntl(running.stdout.file, fcntl.F_SETPIPE_SZ, CHUNK_BYTES)
        return running

    def _start_on_terminal(self) -> _Running:
        master, slave = os.openpty()
        try:
            width, height, _, _ = self._channel.get_terminal_size()
            termios.tcsetwinsize(slave, (height, width))
            child = subprocess.Popen(
                _arguments(self._command),
                executable=_SHELL,
                stdin=slave,
                stdout=slave,
                stderr=slave,
                env={**self._host.environment, "TERM": str(self._terminal)},
                cwd=self._host.home,
                preexec_fn=_take_terminal,
            )
        except BaseException:
            os.close(master)
            raise
        finally:
            os.close(slave)
        terminal = Pipe(os.fdopen(master, "r+b", buffering=0))
        return _Running(child, terminal, terminal, None)

    async def _talk(self) -> None:
        running = self._running
        feeding = asyncio.ensure_future(self._feed())
        sending = [asyncio.ensure_future(self._send(running.stdout, None))]
        if running.stderr is not None:
            sending.append(asyncio.ensure_future(self._send(running.stderr, asyncssh.EXTENDED_DATA_STDERR)))
        try:
            self._report_exit(await asyncio.shield(self._ended))
            # Until every process that holds the pipes has closed them, background ones included: so does
            # sshd, and a client that waits for the end of the stream hangs there in the same way. A
            # session on a terminal ends with its shell.
            await asyncio.wait(sending, timeout=None if running.stderr is not None else _TERMINAL_DRAIN_S)
        finally:
            for task in (feeding, *sending):
                task.cancel()
            await asyncio.wait((feeding, *sending))
            running.close()
            self._channel.close()

    async def _feed(self) -> None:
        stdin = self._running.stdin
        while True:
            while self._input:
                chunk = self._input.popleft()
                if not stdin.closed:
                    try:
                        await stdin.write(chunk)
                    except OSError:  # the command no longer reads; what the client still sends is dropped
                        stdin.close()
            if self._input_ended:
                break
            if self._input_paused:
                self._input_paused = False
                self._channel.resume_reading()
            self._input_changed.clear()
            if not self._input:
                await self._input_changed.wait()
        # The end of the client's input does not hang up a terminal.
        if self._terminal is None:
            stdin.close()

    async def _send(self, source: Pipe, datatype: int | None) -> None:
        while chunk := await source.read():
            await self._may_send.wait()
            if self._channel.is_closing():  # by the client; soon the connection is told lost
                return
            self._channel.write(chunk, datatype)

    def _report_exit(self, code: int) -> None:
        """Tell the client how the command ended, at once and without closing the channel.

        The library's own `exit` closes the channel too; sshd does not while a background process holds the
        pipes, and clients rely on hearing the status before that.
        """
        if self._channel.is_closing():
            return
        if code >= 0:
            self._channel._send_request(b"exit-status", UInt32(code))
            return
        name = next((name for name, number in _SIGNALS.items() if number == -code), f"RT{-code}")
        self._channel._send_request(b"exit-signal", String(name), Boolean(False), String(""), String(""))


@dataclass(frozen=True, slots=True)
class _Running:
    """A running command and what leads to it.

    Attributes:
        child: The command; leader of its session and process group.
        stdin: Its input.
        stdout: Its output; on a terminal the same as `stdin`.
        stderr: Its errors; None on a terminal.
    """

    child: subprocess.Popen[bytes]
    stdin: Pipe
    stdout: Pipe
    stderr: Pipe | None

    def close(self) -> None:
        """Close everything; the command goes on without it."""
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()


_SIGNALS = {number.name.removeprefix("SIG"): int(number) for number in signal.Signals}


def _arguments(command: str | None) -> list[str]:
    # A leading dash makes it a login shell, which is what sshd starts when no command is given.
    return ["-sh"] if command is None else [_SHELL, "-c", command]


def _take_terminal() -> None:
    """Become the leader of a session whose terminal is standard input."""
    os.login_tty(0)
