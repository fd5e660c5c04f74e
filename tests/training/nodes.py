"""Runs the command of a node on this machine as the recorder of a job would, without SSH."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpu_flows.training.commands import NodeCommand
from gpu_flows.training.diagnose import NodeEvidence
from gpu_flows.training.evidence import parse_evidence

SCRIPTS = Path(__file__).parents[2] / "gpu_flows" / "training" / "scripts"
STAND_IN = Path(__file__).with_name("standin")
BASE_PYTHON = Path(sys._base_executable)
"""A Python in which gpu-flows is not installed."""


@dataclass
class Node:
    """A home on this machine, and the jobs that run in it."""

    home: Path
    shell: str = "sh"
    python: Path = BASE_PYTHON
    path: Sequence[Path] = (STAND_IN,)
    jobs: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def job(self, job_id: str = "job") -> Path:
        return self.home / ".gpu-flows" / "jobs" / job_id

    def start(self, command: NodeCommand, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        job = self.job()
        for name, content in command.files.items():
            (job / name).parent.mkdir(parents=True, exist_ok=True)
            (job / name).write_bytes(content)
        (job / "command").write_text(command.command)
        (job / "log").touch()
        # python3 as a box has it: first in the PATH, under that name alone.
        tools = self.home / "bin"
        tools.mkdir(exist_ok=True)
        if not (tools / "python3").exists():
            (tools / "python3").write_text(f'#!/bin/sh\nexec "{self.python}" "$@"\n')
            (tools / "python3").chmod(0o755)
        environ = {
            "HOME": str(self.home),
            "PATH": f"{tools}:/usr/local/bin:/usr/bin:/bin",
            "LANG": "C",
            "GPU_FLOWS_JOB_ID": f"job-{self.home.name}-{os.getpid()}",
            "GPU_FLOWS_JOB_DIR": str(job),
            **({"PYTHONPATH": ":".join(map(str, self.path))} if self.path else {}),
            **(env or {}),
            **command.env,
        }
        with (job / "log").open("ab") as log:
            process = subprocess.Popen(
                [self.shell, str(job / "command")],
                cwd=self.home,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.jobs.append(process)
        return process

    def run(self, command: NodeCommand, env: Mapping[str, str] | None = None, timeout_s: float = 120) -> int:
        return self.start(command, env).wait(timeout_s)

    def log(self) -> str:
        return (self.job() / "log").read_text(errors="replace")

    def rank_log(self, rank: int) -> str:
        return (self.job() / "ranks" / f"{rank}.log").read_text(errors="replace")

    def rank_exit(self, rank: int) -> list[str]:
        return (self.job() / "ranks" / f"{rank}.exit").read_text().split()

    def evidence(self, node: int, exit_code: int | None, **more: object) -> NodeEvidence:
        reply = subprocess.run(
            [self.shell, str(SCRIPTS / "evidence.sh"), "job", "32768"],
            env={"HOME": str(self.home), "PATH": os.environ["PATH"]},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        setup, ranks, log_tail = parse_evidence(reply)
        return NodeEvidence(
            node=node, exit_code=exit_code, why="exit", setup=setup, ranks=ranks, log_tail=log_tail, **more
        )

    def processes(self) -> list[int]:
        """Return what runs with the marker of this node's job."""
        marker = f"GPU_FLOWS_JOB_ID=job-{self.home.name}-{os.getpid()}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                environ = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if state != "Z" and marker in environ:
                found.append(int(folder.name))
        return found

    def close(self) -> None:
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for job in self.jobs:
            job.wait(10)
