"""A box without SSH: scripts run on this machine, with a home and tools of the box's own."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path

from gpu_flows.remote.errors import RemoteScriptFailed


@dataclass
class LocalShell:
    """Stands in for a `RemoteBox` where only its scripts matter.

    Attributes:
        home: The box's home.
        path: Its PATH.
    """

    home: Path
    path: str = field(default_factory=lambda: os.environ["PATH"])

    async def script(self, text: str, *args: str, stdin: bytes | None = None, timeout_s: float) -> bytes:
        process = await asyncio.create_subprocess_exec(
            "/bin/sh",
            "-c",
            text,
            "sh",
            *args,
            cwd=self.home,
            env={"HOME": str(self.home), "PATH": self.path},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(timeout_s):
            stdout, stderr = await process.communicate()
        if process.returncode:
            raise RemoteScriptFailed("a script failed", exit_status=process.returncode, stderr=stderr)
        return stdout
