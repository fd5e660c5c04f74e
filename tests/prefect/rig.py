"""A real Prefect server, a real process worker, and flows deployed to it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from gpu_flows.clouds import open_cloud
from gpu_flows.clouds.base import Box
from gpu_flows.leases.lease import Owner, lease_id, lease_prefix
from tests.end_to_end.conftest import PROJECT, until

FLOW_FILE = "tests/prefect/row_flows.py"


@dataclass
class Rig:
    """What runs for the rows, and what they left behind, found without the code under test."""

    home: Path
    environment: dict[str, str]
    port: int
    namespace: str
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @classmethod
    def start(cls, folder: Path, port: int) -> Rig:
        marks = folder / "marks"
        marks.mkdir(parents=True)
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("GPU_FLOWS_", "PREFECT_"))
        }
        rig = cls(
            home=folder / "gpu-flows",
            port=port,
            namespace="rows",
            environment={
                **clean,
                "PREFECT_HOME": str(folder / "prefect"),
                "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
                "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
                "PREFECT_WORKER_QUERY_SECONDS": "1",
                "PREFECT_WORKER_PREFETCH_SECONDS": "0",
                "PREFECT_RUNNER_POLL_FREQUENCY": "1",
                "GPU_FLOWS_HOME": str(folder / "gpu-flows"),
                "GPU_FLOWS_CONFIG_HOME": str(folder / "config"),
                "GPU_FLOWS_NAMESPACE": "rows",
                "ROWS_MARKS": str(marks),
                "PYTHONPATH": str(PROJECT),
            },
        )
        os.environ.update(
            {name: value for name, value in rig.environment.items() if name.startswith("GPU_FLOWS_")}
        )
        rig.run_prefect("server", "start", "--host", "127.0.0.1", "--port", str(port))
        until(rig.answers, "the server answers", 180)
        made = rig.cli("work-pool", "create", "rows", "--type", "process")
        assert made.returncode == 0, made.stdout + made.stderr
        done = subprocess.run(
            [sys.executable, FLOW_FILE, "deploy"],
            cwd=PROJECT,
            env=rig.environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return rig

    @property
    def prefect(self) -> str:
        return str(Path(sys.executable).parent / "prefect")

    def cli(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a verb of Prefect's command line to its end."""
        return subprocess.run(
            [self.prefect, *arguments],
            env={**self.environment, **environment},
            cwd=PROJECT,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def run_prefect(self, *arguments: str, log: str | None = None) -> subprocess.Popen[bytes]:
        return self._spawn([self.prefect, *arguments], log or arguments[0])

    def run_python(self, *arguments: str, log: str) -> subprocess.Popen[bytes]:
        return self._spawn([sys.executable, *arguments], log)

    def _spawn(self, command: Sequence[str], log: str) -> subprocess.Popen[bytes]:
        with (self.home.parent / f"{log}.log").open("ab") as output:
            process = subprocess.Popen(
                command,
                env=self.environment,
                cwd=PROJECT,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def worker(self, name: str) -> subprocess.Popen[bytes]:
        return self.run_prefect("worker", "start", "--pool", "rows", "--name", name, log=name)

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def api(self, method: str, path: str, body: Any = None) -> Any:
        import httpx

        answer = httpx.request(method, f"http://127.0.0.1:{self.port}/api{path}", json=body, timeout=30)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def launch(self, flow_name: str, deployment: str, **parameters: Any) -> str:
        """Start a flow run on the worker; return its id."""
        found = self.api("GET", f"/deployments/name/{flow_name}/{deployment}")
        run = self.api("POST", f"/deployments/{found['id']}/create_flow_run", {"parameters": parameters})
        return str(UUID(run["id"]))

    def cancel(self, run: str) -> None:
        """Cancel as the UI does."""
        self.api(
            "POST", f"/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}}
        )
        self.mark(run, "cancelled").touch()

    def state(self, run: str) -> str:
        return str(self.api("GET", f"/flow_runs/{run}")["state"]["type"])

    def logs(self, run: str) -> str:
        found = self.api("POST", "/logs/filter", {"logs": {"flow_run_id": {"any_": [run]}}, "limit": 200})
        return "\n".join(each["message"] for each in found)

    def mark(self, run: str, what: str) -> Path:
        return Path(self.environment["ROWS_MARKS"]) / f"{run}.{what}"

    def reached(self, run: str, what: str, timeout_s: float = 120) -> str:
        """Wait until a flow has reached a point; return what it left there, for most points its process id."""
        mark = self.mark(run, what)
        until(
            lambda: mark.exists() and (mark.read_text() or what == "training"),
            f"{run} reaches {what}\n{self.logs(run)}",
            timeout_s,
        )
        return mark.read_text()

    def boxes(self, run: str) -> list[Box]:
        lease = lease_id(Owner(("prefect", run, "row", "0")), self.namespace)
        return open_cloud("local").find(lease_prefix(self.namespace, lease))

    def job_processes(self, box: str) -> list[int]:
        """Return the processes that live in a box's home."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                environment = (entry / "environ").read_bytes()
                lives_there = (
                    os.fsencode(f"{self.home}/local/") in environment and os.fsencode(box) in environment
                )
                # A process that has ended and was not waited for has no command line any more.
                if lives_there and (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
        return found

    def gone(self, run: str, box: str, within_s: float) -> float:
        """Wait until nothing of a run is left; return the seconds that it took."""
        began = time.monotonic()
        until(
            lambda: not self.boxes(run) and not self.job_processes(box),
            f"nothing of {run} is left\n{self.logs(run)}",
            within_s,
        )
        return time.monotonic() - began

    def layer(self, run: str) -> str:
        """Return which layer ended the boxes of a run: the watchdog says so itself, the others in the run's log."""
        found: list[str] = []

        def said() -> bool:
            found[:] = [layer for layer in [self._said(run)] if layer]
            return bool(found)

        until(said, f"somebody says that it ended the boxes of {run}\n{self.logs(run)}", 30)
        return found[0]

    def _said(self, run: str) -> str:
        lease = lease_id(Owner(("prefect", run, "row", "0")), self.namespace)
        log = self.home / "runs" / lease / "watchdog.log"
        if log.exists() and "ended 1 boxes" in log.read_text():
            return "watchdog"
        if self.mark(run, "gave-back").exists():
            return "finally"
        text = self.logs(run)
        if "is gone" not in text:
            return ""
        # Prefect says in the log when a hook begins.
        hook = text.find("Running hook 'give_back'")
        return "hook" if 0 <= hook < text.find("is gone") else "finally"

    def end_workers(self) -> None:
        """End every worker, so that a flow run is for the next one alone."""
        for each in self.started:
            if "worker" in each.args:  # type: ignore[operator]  # a list, as started here
                self.end(each)

    def deployed(self, flow_name: str, deployment: str) -> bool:
        import httpx

        try:
            self.api("GET", f"/deployments/name/{flow_name}/{deployment}")
        except httpx.HTTPStatusError:
            return False
        return True

    def end(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        if process.poll() is None:
            process.kill()
            process.wait()

    def watchdog(self, flow_process: int) -> int:
        """Return the watchdog beside the process of a flow."""
        (found,) = [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit()
            and _parent(entry) == flow_process
            and b"gpu_flows.leases.watchdog" in (entry / "cmdline").read_bytes()
        ]
        return found

    def stop(self) -> None:
        for process in reversed(self.started):
            self.end(process)
        cloud = open_cloud("local")
        for box in cloud.find("gf1-"):
            cloud.destroy(box)


def _parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return 0
