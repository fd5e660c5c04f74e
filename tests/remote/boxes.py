"""What the tests of SSH and of files do with a box."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from gpu_flows.remote.loop import blocking
from gpu_flows.remote.ssh import RemoteBox


def on_box(server, scenario, *, endpoint=None, **options):
    """Run a scenario with a box on the background loop."""

    async def whole():
        async with RemoteBox(endpoint or server.endpoint, server.private_key, **options) as box:
            return await scenario(box)

    return blocking(whole(), 60)


async def succeeds(box):
    """Run a command that does nothing; return its exit status."""
    return (await box.run("true", timeout_s=10)).exit_status


async def exists(path):
    async with asyncio.timeout(10):
        while not path.exists():
            await asyncio.sleep(0.01)


async def gone(pid):
    async with asyncio.timeout(10):
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.02)


def signal_connections(sshd, number=signal.SIGKILL):
    """Send a signal to every process of a server that serves a connection."""
    for pid in sshd.connections():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path
