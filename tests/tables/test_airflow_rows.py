"""Rows A1 to A17: what a real Airflow does, and that no box is billed afterwards, by which layer.

Rows A1, A5, A11 and A17 need no kill and no restart: `tests/airflow/test_dags.py` shows them by `dag.test()`.
The runs of the others are started together and wait where they are hit, so that the table takes minutes.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_flows.clouds.base import Box
from tests.airflow.conftest import PROJECT
from tests.airflow.server import ENDED, Airflow, Run, until

pytestmark = [pytest.mark.table, pytest.mark.timeout(600), pytest.mark.xdist_group("airflow-rows")]

TOGETHER = (
    "a06_setup_killed",
    "a07_marked_in_setup",
    "a02_work_killed",
    "a03_marked_in_work",
    "a04_marked_while_deferred",
    "a08_dagrun_timeout",
    "a13_execution_timeout",
    "a16_teardown_fails",
)


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    home = tmp_path_factory.mktemp("rows")
    shutil.copytree(PROJECT / "tests" / "airflow" / "rows", home / "dags")
    shutil.copy(PROJECT / "dags_examples" / "gpu_flows_reaper.py", home / "dags")
    airflow = Airflow(home, home / "dags")
    try:
        airflow.start()
        yield airflow
    finally:
        airflow.stop()


@pytest.fixture(scope="module")
def runs(airflow: Airflow) -> dict[str, Run]:
    return {dag_id[:3]: Run.begin(airflow, dag_id) for dag_id in TOGETHER}


@pytest.fixture(scope="module")
def hit(airflow: Airflow) -> dict[str, tuple[Run, Box]]:
    """Runs whose job ends by itself, each hit while it trains."""
    begun = {name: Run.begin(airflow, name) for name in ("a10_paused", "a15_worker_dies", "a04_cleared")}
    boxes = {name: run.wait_until_training() for name, run in begun.items()}
    airflow.call("PATCH", "/dags/a10_paused", {"is_paused": True})
    os.kill(int(begun["a15_worker_dies"].task("fit")["pid"]), signal.SIGKILL)
    begun["a04_cleared"].wait_for("fit", "deferred")
    begun["a04_cleared"].clear("fit")
    return {name: (run, boxes[name]) for name, run in begun.items()}


def reap(airflow: Airflow) -> None:
    """Run the reaper's DAG as its schedule would."""
    run = Run.begin(airflow, "gpu_flows_reaper")
    assert run.ended() == "success"


def stalled_pid(airflow: Airflow, run: Run) -> int:
    path = airflow.home / "gpu-flows" / f"{run.dag_id}.pid"
    return int(until(lambda: path.exists() and path.read_text(), f"{run.dag_id} stands in its setup", 200))


def test_a6_c55_a_setup_killed_after_the_create(airflow: Airflow, runs: dict[str, Run]) -> None:
    """By the teardown: `reserve` has succeeded, so that it runs."""
    run = runs["a06"]
    pid = stalled_pid(airflow, run)
    (box,) = run.boxes()
    os.kill(pid, signal.SIGKILL)
    print(f"A6: teardown, {run.wait_until_nothing_is_left(box, 90):.0f} s")
    assert run.ended() == "failed"
    assert run.task("provision")["state"] == "failed"
    assert run.task("teardown")["state"] == "success"


def test_a7_c55_a_run_marked_failed_during_its_setup(airflow: Airflow, runs: dict[str, Run]) -> None:
    """By the teardown."""
    run = runs["a07"]
    stalled_pid(airflow, run)
    (box,) = run.boxes()
    run.mark("failed")
    print(f"A7: teardown, {run.wait_until_nothing_is_left(box, 90):.0f} s")
    # Airflow skips what is pending, the gate too, and may call the run a success when its teardown has run.
    assert run.ended() in ENDED
    assert run.task("teardown")["state"] == "success"
    assert "was killed" in run.log("provision")


def test_a2_work_that_is_killed(airflow: Airflow, runs: dict[str, Run]) -> None:
    """By the teardown."""
    run = runs["a02"]
    box = run.wait_until_training()
    os.kill(int(run.task("fit")["pid"]), signal.SIGKILL)
    print(f"A2: teardown, {run.wait_until_nothing_is_left(box, 90):.0f} s")
    assert run.ended() == "failed"
    assert run.task("gate")["state"] == "upstream_failed"


def test_a3_a_run_marked_failed_while_its_work_runs(airflow: Airflow, runs: dict[str, Run]) -> None:
    """By the teardown, which may begin before the work gets its signal."""
    run = runs["a03"]
    box = run.wait_until_training()
    pid = int(run.task("fit")["pid"])
    run.mark("failed")
    print(f"A3: teardown, {run.wait_until_nothing_is_left(box, 90):.0f} s")
    until(lambda: not Path(f"/proc/{pid}").exists(), "the work has ended", 30)


def test_a4_c57_a_run_marked_failed_while_its_work_is_deferred(
    airflow: Airflow, runs: dict[str, Run]
) -> None:
    """By the teardown."""
    run = runs["a04"]
    box = run.wait_until_training()
    run.wait_for("fit", "deferred")
    run.mark("failed")
    print(f"A4: teardown, {run.wait_until_nothing_is_left(box, 90):.0f} s")


def test_a4_c57_work_that_is_cleared_while_deferred(hit: dict[str, tuple[Run, Box]]) -> None:
    """Its next attempt follows the same job on the same box, and the teardown gives it back."""
    run, box = hit["a04_cleared"]
    until(lambda: run.task("fit")["try_number"] == 2, "the next attempt runs", 90)
    assert run.wait_for("fit", "success", "failed")["state"] == "success"
    log = run.log("fit")
    assert len(re.findall(r"job \S+ runs: ", log)) == 1
    assert ticks(log) == list(range(60))
    assert run.ended() == "success"
    print("A4, cleared: teardown", box.id)
    assert run.boxes() == []


def test_a13_an_execution_timeout_while_deferred(runs: dict[str, Run]) -> None:
    """By the teardown: Airflow does not enforce it, the trigger does."""
    run = runs["a13"]
    assert run.ended(200) == "failed"
    assert "still ran at" in run.log("fit")
    assert run.boxes() == []


def test_a15_c59_a_retry_follows_the_job_that_runs(hit: dict[str, tuple[Run, Box]]) -> None:
    """It starts no second job and rents no second box; every line of the log is there."""
    run, box = hit["a15_worker_dies"]
    run.wait_for("fit", "success")
    assert [held.id for held in run.boxes()] in ([box.id], [])
    assert run.ended() == "success"
    assert run.task("fit")["try_number"] == 2
    log = run.log("fit")
    assert "was started before: following it" in log
    assert len(re.findall(r"job \S+ runs: ", log)) == 1
    # What the first attempt had received when it was killed may come once more; nothing is missing.
    assert set(ticks(log)) == set(range(60))
    assert run.boxes() == []


def test_a8_a_dagrun_timeout(airflow: Airflow, runs: dict[str, Run]) -> None:
    """By the reaper: Airflow skips the teardown, and the run has ended."""
    run = runs["a08"]
    assert run.ended(240) == "failed"
    for box in run.boxes():
        reap(airflow)
        print(f"A8: reaper, {run.wait_until_nothing_is_left(box, 30):.0f} s")
    assert run.boxes() == []


def test_a16_a_teardown_that_fails_fails_the_run(airflow: Airflow, runs: dict[str, Run]) -> None:
    """By the reaper; plain Airflow calls such a run a success."""
    run = runs["a16"]
    assert run.ended(200) == "failed"
    assert run.task("fit")["state"] == "success"
    for box in run.boxes():
        reap(airflow)
        print(f"A16: reaper, {run.wait_until_nothing_is_left(box, 30):.0f} s")
    assert run.boxes() == []


def test_a10_a_dag_paused_while_it_trains(hit: dict[str, tuple[Run, Box]]) -> None:
    """By the dead-man: Airflow schedules nothing more, and nobody renews the heartbeat."""
    run, box = hit["a10_paused"]
    print(f"A10: dead-man, {run.wait_until_nothing_is_left(box, 120):.0f} s")
    assert run.state == "running"
    assert run.task("teardown")["state"] is None


def test_a12_c57_a_triggerer_that_restarts_goes_on_at_the_next_byte(airflow: Airflow) -> None:
    """Nothing of the log is lost, nothing comes twice."""
    run = Run.begin(airflow, "a12_triggerer_restarted")
    run.wait_until_training()
    airflow.restart("triggerer")
    assert run.ended(150) == "success"
    assert ticks(run.log("fit")) == list(range(60))
    assert run.boxes() == []


def test_a14_a_scheduler_that_restarts(airflow: Airflow) -> None:
    """By the teardown: a run goes on where it was."""
    run = Run.begin(airflow, "a14_scheduler_restarted")
    run.wait_until_training()
    run.wait_for("fit", "deferred")
    airflow.restart("scheduler")
    assert run.ended(200) == "success"
    assert run.boxes() == []


def test_a9_a_supervisor_that_is_killed(airflow: Airflow) -> None:
    """By the teardown, after Airflow's heartbeat timeout; the orphaned task ends itself at once."""
    run = Run.begin(airflow, "a09_supervisor_killed")
    box = run.wait_until_training()
    pid = int(run.task("fit")["pid"])
    supervisor = int(re.findall(r"^PPid:\s*(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[0])
    os.kill(supervisor, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{pid}").exists(), "the orphan has ended", 15)
    print(f"A9: teardown, {run.wait_until_nothing_is_left(box, 150):.0f} s")
    assert run.ended() == "failed"


def test_nothing_is_left_anywhere(airflow: Airflow) -> None:
    assert airflow.cloud.find("gf1-") == []


def ticks(log: str) -> list[int]:
    return [int(number) for number in re.findall(r"tick (\d+)", log)]
