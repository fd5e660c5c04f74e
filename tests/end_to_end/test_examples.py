"""The examples, each run as it stands by a real Airflow and a real Prefect."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import PROJECT, Machine

pytestmark = pytest.mark.table


def python(machine: Machine, program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=PROJECT,
        env={**machine.environment, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_the_airflow_example_trains_and_gives_back(machine: Machine, tmp_path: Path) -> None:
    settings = {
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(PROJECT / "dags_examples"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{tmp_path}/airflow.db",
    }
    airflow = str(Path(sys.executable).parent / "airflow")
    made = subprocess.run(
        [airflow, "db", "migrate"], env={**machine.environment, **settings}, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr[-2000:]
    done = python(
        machine,
        "from dags_examples.airflow_digits import dag_object\nrun = dag_object.test()\nprint('state', run.state)",
        **settings,
    )
    assert "state success" in done.stdout.replace("DagRunState.", "").lower(), (
        done.stdout[-3000:] + done.stderr[-3000:]
    )
    (report,) = machine.home.glob("runs/*/report.json")
    assert json.loads(report.read_text())["ok"]
    assert machine.boxes() == []


def test_the_prefect_example_trains_and_gives_back(machine: Machine, tmp_path: Path) -> None:
    done = python(
        machine,
        "from prefect.testing.utilities import prefect_test_harness\n"
        "from dags_examples.prefect_digits import digits\n"
        "with prefect_test_harness(server_startup_timeout=180):\n"
        "    print('cost', digits(nodes=1)['cost'])\n",
        PREFECT_HOME=str(tmp_path / "prefect"),
    )
    assert "cost {'usd': 0.0, 'exact': True}" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    assert machine.boxes() == []
