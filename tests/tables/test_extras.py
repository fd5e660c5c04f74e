"""Each extra alone, beside the newest release of what it is for, in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import PROJECT, Machine, machine

__all__ = ["machine"]

pytestmark = pytest.mark.table

RUN = """
import importlib.util, sys
import {package}
import {surface}
assert importlib.util.find_spec("{other}") is None, "{other} came along"
from gpu_flows import run
report = run("train.sh", gpus="cpu", max_duration="5m")
assert report.ok, report.sentence
print("trained beside", getattr({package}, "__version__", "?"))
"""


@pytest.mark.parametrize(
    ("extra", "package", "surface", "other"),
    [
        ("", "asyncssh", "gpu_flows", "airflow"),
        ("airflow", "airflow", "airflow_provider", "prefect"),
        ("prefect", "prefect", "prefect_blocks.flows", "airflow"),
    ],
)
def test_an_extra_alone_installs_and_trains(
    machine: Machine, tmp_path: Path, extra: str, package: str, surface: str, other: str
) -> None:
    uv = str(Path(sys.executable).parent / "uv")
    environment = tmp_path / "environment"
    wanted = f"{PROJECT}[{extra}]" if extra else str(PROJECT)
    for command in (
        [uv, "venv", "--quiet", "--python", sys.executable, str(environment)],
        [uv, "pip", "install", "--quiet", "--python", str(environment / "bin" / "python"), wanted],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-3000:]
    (tmp_path / "train.sh").write_text("echo trained\n")
    done = subprocess.run(
        [
            str(environment / "bin" / "python"),
            "-c",
            RUN.format(package=package, surface=surface, other=other),
        ],
        cwd=tmp_path,
        env={
            **machine.environment,
            "AIRFLOW_HOME": str(tmp_path / "airflow"),
            "PREFECT_HOME": str(tmp_path / "prefect"),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    print(done.stdout)
