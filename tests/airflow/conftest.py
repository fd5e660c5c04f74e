"""An Airflow of the tests' own: its home, its database, made once."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
AIRFLOW = str(Path(sys.executable).parent / "airflow")

# Airflow reads it when it is first imported, which no test does before this file is.
_HOME = tempfile.mkdtemp(prefix="gpu-flows-airflow-")
os.environ["AIRFLOW_HOME"] = _HOME
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)


def airflow_environment(home: Path, dags: Path) -> dict[str, str]:
    """Return the environment of a process that belongs to this Airflow, with gpu-flows at home in it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW", "GPU_FLOWS_"))}
    return {
        **kept,
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__UNIT_TEST_MODE": "False",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
        "AIRFLOW__GPU_FLOWS__NAMESPACE": "airtest",
        "GPU_FLOWS_HOME": str(home / "gpu-flows"),
        "GPU_FLOWS_CONFIG_HOME": str(home / "config"),
        "PYTHONPATH": str(PROJECT),
    }


@pytest.fixture
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine without any setting of gpu-flows but its homes."""
    for name in [name for name in os.environ if name.startswith("GPU_FLOWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GPU_FLOWS_HOME", str(tmp_path / "gpu-flows"))
    monkeypatch.setenv("GPU_FLOWS_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def run_airflow(*arguments: str, env: dict[str, str], timeout_s: float = 120) -> str:
    done = subprocess.run([AIRFLOW, *arguments], env=env, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout
