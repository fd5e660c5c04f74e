"""What an SSH session on a box runs: a command over pipes, or a shell on a terminal, as sshd would."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import termios
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_SHELL = "/bin/sh"
_CANNOT_EXECUTE = 126
"""Exit status of a shell that cannot start a command."""
_CHUNK_BYTES = 256 << 10
_PIPE_BYTES = 1 << 20
_TERMINAL_DRAIN_S = 1.0


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


@dataclass(frozen=True, slots=True)
class Sessions:
    """Serves the sessions of one box.

    Attributes:
        environment: The whole environment of the box's processes.
        home: Where they start.
        children: Reaps them.
    """

    environment: Mapping[str, str]
    home: Path
    children: Children

    async def serve(self, process: Any) -> None:
        """Serve one session until its command has ended or the client is gone.

        Args:
            process: The `asyncssh.SSHServerProcess`.
        """
        if process.subsystem is not None:
            process.exit(1)
            return
        try:
            session = (_start_on_terminal if process.term_type else _start_on_pipes)(self, process)
        except (OSError, ValueError) as error:  # too long a command, a NUL in it, no process to be had
            process.stderr.write(f"cannot start the command: {error}\n".encode())
            process.exit(_CANNOT_EXECUTE)
            return
        ended = self.children.watch(session.child)
        gone = asyncio.ensure_future(process.wait_closed())
        talk = asyncio.ensure_future(session.talk(process, ended))
        # When the client goes first, the command lives on; only its pipes are closed.
        await asyncio.wait({gone, talk}, return_when=asyncio.FIRST_COMPLETED)
        talk.cancel()
        await asyncio.wait({talk})
        session.close()
        process.close()
        await gone


@dataclass(frozen=True, slots=True)
class _Session:
    """A running command and the descriptors that lead to it.

    Attributes:
        child: The command; leader of its session and process group.
        stdin: Descriptor of its input.
        stdout: Descriptor of its output; with a terminal the same as `stdin`.
        stderr: Descriptor of its errors; None with a terminal.
    """

    child: subprocess.Popen[bytes]
    stdin: _Pipe
    stdout: _Pipe
    stderr: _Pipe | None

    @property
    def on_terminal(self) -> bool:
        return self.stderr is None

    async def talk(self, process: Any, ended: asyncio.Future[int]) -> None:
        feeding = asyncio.ensure_future(self._feed(process, ended))
        output = [asyncio.ensure_future(_copy(self.stdout, process.stdout))]
        if self.stderr is not None:
            output.append(asyncio.ensure_future(_copy(self.stderr, process.stderr)))
        try:
            code = await asyncio.shield(ended)
            _report_exit(process, code)
            # Until every process that holds the pipes has closed them, background ones included: so does
            # sshd, and a client that waits for the end of the stream hangs there in the same way. A
            # session on a terminal ends with its shell.
            await asyncio.wait(output, timeout=_TERMINAL_DRAIN_S if self.on_terminal else None)
        finally:
            for task in (feeding, *output):
                task.cancel()
            await asyncio.wait((feeding, *output))

    async def _feed(self, process: Any, ended: asyncio.Future[int]) -> None:
        """Pass on what the client sends: bytes, signals, window sizes, its end."""
        import asyncssh

        while True:
            try:
                chunk = await process.stdin.read(_CHUNK_BYTES)
                if not chunk:
                    break
                if not self.stdin.closed:
                    await self.stdin.write(chunk)
            except asyncssh.TerminalSizeChanged as change:
                termios.tcsetwinsize(self.stdin.file, (change.height, change.width))
            except asyncssh.SignalReceived as received:
                number = getattr(signal, f"SIG{received.signal}", None)
                if number is not None and not ended.done():
                    _signal_group(self.child.pid, number)
            except asyncssh.BreakReceived:
                continue
            except asyncssh.Error:  # the connection is gone, which is the end of the input
                break
            except OSError:  # the command no longer reads; what the client still sends is dropped
                self.stdin.close()
        if not self.on_terminal:
            self.stdin.close()

    def close(self) -> None:
        """Close every descriptor; the command goes on without them."""
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()


def _start_on_pipes(sessions: Sessions, process: Any) -> _Session:
    child = subprocess.Popen(
        _arguments(process.command),
        executable=_SHELL,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pipesize=_PIPE_BYTES,
        bufsize=0,
        env=dict(sessions.environment),
        cwd=sessions.home,
        start_new_session=True,
    )
    return _Session(child, _Pipe(child.stdin), _Pipe(child.stdout), _Pipe(child.stderr))


def _start_on_terminal(sessions: Sessions, process: Any) -> _Session:
    master, slave = os.openpty()
    try:
        width, height, _, _ = process.term_size
        termios.tcsetwinsize(slave, (height, width))
        child = subprocess.Popen(
            _arguments(process.command),
            executable=_SHELL,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**sessions.environment, "TERM": process.term_type},
            cwd=sessions.home,
            preexec_fn=_take_terminal,
        )
    except BaseException:
        os.close(master)
        raise
    finally:
        os.close(slave)
    terminal = _Pipe(os.fdopen(master, "r+b", buffering=0))
    return _Session(child, terminal, terminal, None)


def _arguments(command: str | None) -> list[str]:
    # A leading dash makes it a login shell, which is what sshd starts when no command is given.
    return ["-sh"] if command is None else [_SHELL, "-c", command]


def _take_terminal() -> None:
    """Become the leader of a session whose terminal is standard input."""
    os.login_tty(0)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _report_exit(process: Any, code: int) -> None:
    """Tell the client how the command ended, at once and without closing the channel.

    The library's own `exit` closes the channel too; sshd does not while a background process holds the
    pipes, and clients rely on hearing the status before that.

    Args:
        process: The session.
        code: Return code, negative for a signal.
    """
    from asyncssh.packet import Boolean, String, UInt32

    channel = process.channel
    if code >= 0:
        channel._send_request(b"exit-status", UInt32(code))
        return
    try:
        name = signal.Signals(-code).name.removeprefix("SIG")
    except ValueError:  # a real-time signal without a name
        name = f"RT{-code}"
    channel._send_request(b"exit-signal", String(name), Boolean(False), String(""), String(""))


async def _copy(source: _Pipe, target: Any) -> None:
    """Pass on everything that comes out of a pipe, no faster than the client takes it."""
    while chunk := await source.read():
        target.write(chunk)
        await target.drain()


class _Pipe:
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
                return os.read(self.file.fileno(), _CHUNK_BYTES)
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
