"""The examples, each run as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpu_flows.clouds.local import LocalCloud
from tests.airflow.conftest import PROJECT, airflow_environment, run_airflow

PROGRAM = """
import importlib
for name in ("airflow_box", "airflow_sweep"):
    run = importlib.import_module(f"dags_examples.{name}").dag_object.test()
    print("ended", name, run.state.value, flush=True)
"""


@pytest.mark.table
def test_the_examples_train_and_give_back(tmp_path: Path) -> None:
    environment = airflow_environment(tmp_path, PROJECT / "dags_examples")
    run_airflow("db", "migrate", env=environment)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=290,
    )
    ended = [line for line in done.stdout.splitlines() if line.startswith("ended ")]
    assert ended == ["ended airflow_box success", "ended airflow_sweep success"], done.stdout[-4000:]
    assert LocalCloud(root=tmp_path / "gpu-flows" / "local").find("gf1-") == []


def test_the_reaper_is_a_dag_of_its_own() -> None:
    from dags_examples.gpu_flows_reaper import dag_object

    assert dag_object.task_ids == ["reap"]
    assert dag_object.max_active_runs == 1
