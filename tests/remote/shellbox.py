"""A box without SSH: the same scripts, run by a chosen shell on this machine with a home of their own."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

from gpu_flows.remote.errors import RemoteScriptFailed

SHELLS = ("dash", "bash", "busybox")


class ShellBox:
    """Takes the place of a RemoteBox where the subject is the script and not the connection.

    With busybox every other command is its own applet too.
    """

    def __init__(self, folder: Path, shell: str, home: Path | None = None) -> None:
        self.shell = shell
        self.home = home or folder / "home"
        self.home.mkdir(mode=0o700, parents=True)
        tools = folder / "bin"
        tools.mkdir(parents=True)
        path = str(tools)
        if shell == "busybox":
            busybox = shutil.which("busybox")
            for applet in subprocess.check_output([busybox, "--list"], text=True).split():
                (tools / applet).symlink_to(busybox)
            for real in ("python3", "bash"):
                (tools / real).symlink_to(shutil.which(real))
        else:
            (tools / "sh").symlink_to(shutil.which(shell))
            path += ":/usr/sbin:/usr/bin:/sbin:/bin"
        self.tools = tools
        self.marker = f"GPU_FLOWS_TEST_BOX={os.urandom(6).hex()}"
        name, _, value = self.marker.partition("=")
        self.env = {"HOME": str(self.home), "PATH": path, name: value}
        self.prefix: list[str] = []

    async def open(self, text: str, *args: str, **more) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self.prefix, str(self.tools / "sh"), "-c", text, "gpu-flows", *args,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env=self.env, cwd=self.home, start_new_session=True, **more,
        )  # fmt: skip

    async def script(self, text: str, *args: str, stdin: bytes | None = None, timeout_s: float) -> bytes:
        async with asyncio.timeout(timeout_s):
            process = await self.open(text, *args)
            try:
                out, err = await process.communicate(stdin or b"")
            finally:
                await _finished(process)
        if process.returncode != 0:
            raise RemoteScriptFailed(err.decode(), exit_status=process.returncode, stderr=err)
        assert err == b"", err
        return out

    async def stream(self, text: str, *args: str, stdin=None, timeout_s: float) -> AsyncIterator[bytes]:
        async with asyncio.timeout(timeout_s):
            process = await self.open(text, *args)
            try:
                while chunk := await process.stdout.read(1 << 18):
                    yield chunk
            finally:
                await _finished(process)

    def processes(self) -> list[int]:
        """Return all that was started here and lives."""
        return [pid for pid in pids() if self.marker.encode() in environ(pid).split(b"\0")]

    def close(self) -> None:
        while found := self.processes():
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


async def _finished(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    await process.communicate()


def in_every_shell(scenario):
    """Make a test of a scenario that takes a box: run with every shell, all at the same time."""
    parameters = list(inspect.signature(scenario).parameters.values())
    own_path = "tmp_path" in inspect.signature(scenario).parameters

    async def test(tmp_path: Path, **arguments) -> None:
        boxes = [ShellBox(tmp_path / shell, shell) for shell in SHELLS if shutil.which(shell)]

        async def one(box: ShellBox) -> None:
            path = {"tmp_path": tmp_path / box.shell} if own_path else {}
            try:
                await scenario(box, **path, **arguments)
            except BaseException as error:
                error.add_note(f"with {box.shell}")
                raise

        try:
            async with asyncio.TaskGroup() as group:
                for box in boxes:
                    group.create_task(one(box))
        finally:
            for box in boxes:
                box.close()

    test.__name__, test.__doc__, test.__module__ = scenario.__name__, scenario.__doc__, scenario.__module__
    given = [p for p in parameters if p.name not in ("box", "tmp_path")]
    path = inspect.Parameter("tmp_path", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    test.__signature__ = inspect.Signature([path, *given])
    return test


async def end(pid: int) -> None:
    """Kill a process, and wait until it is dead."""
    os.kill(pid, signal.SIGKILL)
    await until(lambda: process_state(pid) in ("", "Z", "X"))


def process_state(pid: int) -> str:
    """Return the state of a process as /proc has it; empty when there is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def environ(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def cmdline(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def with_variable(variable: str) -> list[int]:
    return [pid for pid in pids() if variable.encode() in environ(pid).split(b"\0")]


async def until(condition, timeout_s: float = 20) -> None:
    """Wait for an event."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


def connections_of(server) -> list[int]:
    """Return the processes of an OpenSSH server that serve connections now, parents before children."""
    children: dict[int, list[int]] = {}
    for pid in pids():
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z" and b"sshd" in Path(f"/proc/{pid}/cmdline").read_bytes():
                children.setdefault(int(fields[1]), []).append(pid)
    found, todo = [], [server.process.pid]
    while todo:
        below = children.get(todo.pop(0), [])
        found += below
        todo += below
    return found
