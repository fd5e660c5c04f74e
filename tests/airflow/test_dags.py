"""Whole DAGs, run by Airflow's own `dag.test()` on boxes of this machine, in one process of their own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.airflow.conftest import PROJECT, airflow_environment, run_airflow

pytestmark = pytest.mark.xdist_group("airflow-dags")

DAGS = ("whole", "deferred", "failing", "nothing_to_rent", "sweep", "in_one")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    home = tmp_path_factory.mktemp("airflow")
    environment = {
        **airflow_environment(home, PROJECT / "tests" / "airflow" / "dags"),
        "RESULTS": str(home / "results.json"),
        "AIRFLOW_VAR_STORE": str(home / "store"),
        "AIRFLOW_CONN_HUB": json.dumps({"conn_type": "generic", "password": "a-token-of-hub-9"}),
        "COLUMNS": "400",
        "NO_COLOR": "1",
    }
    run_airflow("db", "migrate", env=environment)
    done = subprocess.run(
        [sys.executable, "-m", "tests.airflow.run_dags", *DAGS],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results: dict[str, Any] = json.loads((home / "results.json").read_text())
    _, *logs = re.split(r"^=== (\w+)$", done.stdout + done.stderr, flags=re.MULTILINE)
    for name, log in zip(logs[::2], logs[1::2], strict=True):
        results[name]["log"] = log
    results["home"] = home
    return results


def test_a_box_is_rented_used_and_given_back(ran: dict[str, Any]) -> None:
    run = ran["whole"]
    assert run["state"] == "success"
    assert set(run["states"].values()) == {"success"}
    report = run["xcoms"]["box.fit[-1].return_value"]
    assert report["cause"] == "succeeded"
    assert report["owner"] == ["airflow", "whole", run["run_id"], "box", "-1"]
    assert f"training with 2 arguments: {run['run_id']}" in run["log"]
    (ended,) = run["xcoms"]["box.teardown[-1].return_value"]["ended"]
    assert ended["name"].startswith("gf1-airtest-")


def test_outputs_are_copied_to_their_url(ran: dict[str, Any]) -> None:
    run = ran["whole"]
    stored = ran["home"] / "store" / "models" / "model.txt"
    assert stored.read_text() == f"weights of {run['run_id']}\n"
    assert run["xcoms"]["box.fit[-1].return_value"]["outputs"] == [f"file://{stored}"]


def test_a_secret_reaches_the_job_and_no_log(ran: dict[str, Any]) -> None:
    assert "the token is ***" in ran["whole"]["log"]
    assert "a-token-of-hub-9" not in json.dumps(ran["whole"])
    kept = [
        path for path in ran["home"].rglob("*") if path.is_file() and b"a-token-of-hub-9" in path.read_bytes()
    ]
    assert kept == []


def test_a_burst_of_300_000_bytes_before_the_end_is_whole_in_the_log(ran: dict[str, Any]) -> None:
    run = ran["deferred"]
    assert run["state"] == "success"
    seen = re.findall(r"line (\d{5}) \.{88}", run["log"])
    assert seen == [f"{number:05d}" for number in range(3000)]
    assert "the last line" in run["log"]
    report = run["xcoms"]["box.fit[-1].return_value"]
    assert Path(report["outputs"][0]).name == "model.txt"


def test_c57_work_that_fails_fails_the_run_with_its_cause(ran: dict[str, Any]) -> None:
    """Rows A1 and A17: the teardown runs, and the gate carries the failure of the work to the run."""
    run = ran["failing"]
    assert run["state"] == "failed"
    assert run["states"] == {
        "box.reserve[-1]": "success",
        "box.provision[-1]": "success",
        "box.fit[-1]": "failed",
        "box.teardown[-1]": "success",
        "box.gate[-1]": "upstream_failed",
    }
    assert "about to fail" in run["log"]
    assert "ScriptFailed" in run["log"]


def test_the_teardown_runs_when_renting_fails(ran: dict[str, Any]) -> None:
    """Row A5: plain Airflow never runs the teardown of a setup that failed."""
    run = ran["nothing_to_rent"]
    assert run["state"] == "failed"
    assert run["states"]["box.provision[-1]"] == "failed"
    assert run["states"]["box.teardown[-1]"] == "success"


def test_each_cell_of_a_sweep_has_a_box_of_its_own(ran: dict[str, Any]) -> None:
    """Row A11."""
    run = ran["sweep"]
    assert run["state"] == "success"
    leases = {run["xcoms"][f"cell.box.provision[{cell}].return_value"]["lease"] for cell in (0, 1)}
    assert len(leases) == 2
    owners = [run["xcoms"][f"cell.box.fit[{cell}].return_value"]["owner"] for cell in (0, 1)]
    assert [owner[-2:] for owner in owners] == [["cell.box", "0"], ["cell.box", "1"]]


def test_all_of_it_in_one_task(ran: dict[str, Any]) -> None:
    run = ran["in_one"]
    assert run["state"] == "success"
    assert run["xcoms"]["look[-1].return_value"]["offers"][0]["cloud"] == "local"
    assert run["xcoms"]["wait[-1].return_value"] == 1
    assert run["xcoms"]["stay[-1].return_value"] == 1
    assert run["xcoms"]["train[-1].return_value"]["ok"]
    assert run["xcoms"]["reap[-1].return_value"] == {"seen": [], "ended": [], "unknown": []}


def test_no_box_and_no_process_is_left(ran: dict[str, Any]) -> None:
    assert [ran[name]["boxes"] for name in DAGS] == [[]] * len(DAGS)
    home = str(ran["home"]).encode()
    left = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if b"HOME=" + home in (entry / "environ").read_bytes():
                left.append((entry / "cmdline").read_text())
        except OSError:
            continue
    assert left == []
