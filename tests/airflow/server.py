"""A real Airflow: scheduler, API server, DAG processor and triggerer, each a process of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_flows.clouds.base import Box
from gpu_flows.clouds.local import LocalCloud
from gpu_flows.leases.lease import Owner, lease_id, lease_prefix
from tests.airflow.conftest import AIRFLOW, PROJECT, airflow_environment, run_airflow
from tests.clouds.conftest import marked_processes

COMPONENTS = ("api-server", "scheduler", "dag-processor", "triggerer")
ENDED = ("success", "failed")


def until(condition: Callable[[], Any], what: str, timeout_s: float = 120) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.5)
    return found


@dataclass
class Airflow:
    """A whole Airflow with gpu-flows beside it, over its public API."""

    home: Path
    dags: Path
    port: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    token: str = ""

    def start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        url = f"http://127.0.0.1:{self.port}"
        self.environment = {
            **airflow_environment(self.home, self.dags),
            "AIRFLOW__API__BASE_URL": url,
            "AIRFLOW__API__PORT": str(self.port),
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__API_AUTH__JWT_SECRET": "a-secret-of-the-tests-that-is-long-enough-for-sha-512-of-jwt-tokens!!",
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
            "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
            "AIRFLOW__CORE__PARALLELISM": "12",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
            "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": "0",
            "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": "0",
            "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "25",
            "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "3",
            "AIRFLOW__SCHEDULER__ENABLE_HEALTH_CHECK": "False",
            "AIRFLOW__SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "1",
        }
        run_airflow("db", "migrate", env=self.environment)
        for component in COMPONENTS:
            self.run(component)
        until(self._is_healthy, "Airflow is healthy", 240)

    def run(self, component: str) -> None:
        with (self.home / f"{component}.log").open("ab") as log:
            self.processes[component] = subprocess.Popen(
                [AIRFLOW, component],
                env=self.environment,
                cwd=PROJECT,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def restart(self, component: str) -> None:
        process = self.processes[component]
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            # A scheduler waits for what its executor runs; what an impatient supervisor does next is a restart too.
            process.kill()
            process.wait()
        self.run(component)

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        # What they have forked lives in their sessions; it is found by the home that it was given.
        marker = os.fsencode(f"AIRFLOW_HOME={self.home}")
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if marker in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:
                continue
        cloud = self.cloud
        for box in cloud.find("gf1-"):
            cloud.destroy(box)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        if not self.token:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/auth/token", timeout=20) as reply:
                self.token = json.load(reply)["access_token"]
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/api/v2{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.load(reply)

    def _is_healthy(self) -> bool:
        try:
            health = self.call("GET", "/monitor/health")
            known = {dag["dag_id"] for dag in self.call("GET", "/dags")["dags"]}
        except (OSError, urllib.error.URLError, ValueError, KeyError):
            return False
        parts = ("metadatabase", "scheduler", "triggerer", "dag_processor")
        return all(health[part]["status"] == "healthy" for part in parts) and bool(known)

    @property
    def cloud(self) -> LocalCloud:
        return LocalCloud(root=self.home / "gpu-flows" / "local")


@dataclass
class Run:
    """One run of a DAG."""

    airflow: Airflow
    dag_id: str
    run_id: str

    @classmethod
    def begin(cls, airflow: Airflow, dag_id: str) -> Run:
        def trigger() -> Any:
            try:
                return airflow.call("POST", f"/dags/{dag_id}/dagRuns", {"logical_date": None})
            except urllib.error.HTTPError as error:
                if error.code in (404, 409, 500):
                    return None
                raise

        return cls(airflow, dag_id, until(trigger, f"{dag_id} can be triggered")["dag_run_id"])

    @property
    def _path(self) -> str:
        return f"/dags/{self.dag_id}/dagRuns/{self.run_id.replace('+', '%2B')}"

    @property
    def state(self) -> str:
        return str(self.airflow.call("GET", self._path)["state"])

    def mark(self, state: str) -> None:
        self.airflow.call("PATCH", self._path, {"state": state})

    def clear(self, name: str) -> None:
        body = {
            "dry_run": False,
            "dag_run_id": self.run_id,
            "task_ids": [f"box.{name}"],
            "only_failed": False,
        }
        self.airflow.call("POST", f"/dags/{self.dag_id}/clearTaskInstances", body)

    def task(self, name: str) -> dict[str, Any]:
        return dict(self.airflow.call("GET", f"{self._path}/taskInstances/box.{name}"))

    def wait_for(self, name: str, *states: str, timeout_s: float = 150) -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            task = self.task(name)
            return task if task["state"] in states else None

        found: dict[str, Any] = until(reached, f"{self.dag_id}: {name} is {states}", timeout_s)
        return found

    def ended(self, timeout_s: float = 120) -> str:
        until(lambda: self.state in ENDED, f"{self.dag_id} has ended", timeout_s)
        return self.state

    def boxes(self) -> list[Box]:
        owner = Owner(("airflow", self.dag_id, self.run_id, "box", "-1"))
        return self.airflow.cloud.find(lease_prefix("airtest", lease_id(owner, "airtest")))

    def log(self, name: str) -> str:
        folder = self.airflow.home / "logs" / f"dag_id={self.dag_id}" / f"run_id={self.run_id}"
        files = sorted((folder / f"task_id=box.{name}").glob("*.log*"))
        return "".join(path.read_text() for path in files)

    def wait_until_training(self) -> Box:
        until(lambda: "tick 2" in self.log("fit"), f"{self.dag_id} trains", 150)
        (box,) = self.boxes()
        return box

    def wait_until_nothing_is_left(self, box: Box, within_s: float) -> float:
        """Return the seconds until no box and no process of it is there any more."""
        began = time.monotonic()
        until(lambda: not self.boxes(), f"{self.dag_id}: no box is billed", within_s)
        until(lambda: not marked_processes(f"GPU_FLOWS_BOX_ID={box.id}"), f"{box.id}: no process is left", 15)
        return time.monotonic() - began
