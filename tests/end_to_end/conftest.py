from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpu_flows.clouds import open_cloud
from gpu_flows.clouds.base import Box

PROJECT = Path(__file__).parents[2]


@dataclass
class Machine:
    """A user's machine: a home of gpu-flows, and what runs for it, found without the code under test."""

    home: Path
    environment: dict[str, str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def boxes(self) -> list[Box]:
        return open_cloud("local").find("gf1-")

    def processes(self) -> dict[int, str]:
        """Return every live process that belongs to a box of this home: its server, its jobs, its dead-man."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            home = next((v for v in environment if v.startswith(b"HOME=")), b"")
            if command and os.fsencode(self.home) in home:
                found[int(entry.name)] = command
        return found

    def start(self, arguments: Sequence[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=self.environment,
            cwd=PROJECT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def cli(self, *arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a verb of the command line as a user does, in a process of its own."""
        return subprocess.run(
            [str(Path(sys.executable).parent / "gpu-flows"), *arguments],
            env=self.environment,
            cwd=PROJECT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )


def until(condition: Callable[[], object], what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.1)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    home = tmp_path / "gpu-flows"
    names = {"GPU_FLOWS_HOME": str(home), "GPU_FLOWS_CONFIG_HOME": str(tmp_path / "config")}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    for name in [name for name in os.environ if name.startswith("GPU_FLOWS_") and name not in names]:
        monkeypatch.delenv(name)
    machine = Machine(home, dict(os.environ))
    yield machine
    for process in machine.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    cloud = open_cloud("local")
    for box in cloud.find("gf1-"):
        cloud.destroy(box)
    until(lambda: not machine.processes(), "no process of a box is left", 30)
