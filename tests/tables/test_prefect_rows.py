"""The rows P1-P13: what ends the boxes of a flow run, whatever ended the flow run; a real server and a real worker.

Each row shows that no box and no process of a job is left within a bound, and which layer saw to it. C61 is P1
(cancelled while it trains), P4 and P12 (work that a cancellation does not reach by itself).
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator

import pytest

from tests.end_to_end.conftest import PROJECT, until
from tests.prefect.rig import FLOW_FILE, Rig

pytestmark = [pytest.mark.table, pytest.mark.xdist_group("prefect-rows")]

BOUND_S = 60.0
"""A cancel is heard of within seconds, and Prefect kills what has not ended 30 s later."""


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("GPU_FLOWS_")]:
            patch.delenv(name)
        # Set by the rig; undone here.
        for name in ("GPU_FLOWS_HOME", "GPU_FLOWS_CONFIG_HOME", "GPU_FLOWS_NAMESPACE"):
            patch.setenv(name, "")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        rig = Rig.start(tmp_path_factory.mktemp("rows"), port)
        try:
            yield rig
        finally:
            rig.stop()


@pytest.fixture(scope="module")
def worker(rig: Rig) -> None:
    """The worker of the rows that leave it alone."""
    rig.worker("worker-1")


Ends = Callable[..., str]


@pytest.fixture
def ends(rig: Rig, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Ends:
    def ended(run: str, box: str, within_s: float = BOUND_S) -> str:
        took_s = rig.gone(run, box, within_s)
        layer = rig.layer(run)
        with capsys.disabled():
            print(f"  {request.node.name}: nothing left after {took_s:.1f} s, by the {layer}")
        return layer

    return ended


def training(rig: Rig, run: str) -> str:
    """Wait until a flow trains; return its box."""
    rig.reached(run, "training")
    (box,) = rig.boxes(run)
    assert rig.job_processes(box.id)
    return box.id


def test_p1_cancelled_during_create(rig: Rig, worker: None, ends: Ends) -> None:
    run = rig.launch("trains", "trains", slow="create")
    rig.reached(run, "in-create")
    (box,) = rig.boxes(run)
    rig.cancel(run)
    assert ends(run, box.id) == "finally"
    until(lambda: rig.state(run) == "CANCELLED", "a clean Cancelled")


@pytest.mark.parametrize("flow_name", ["trains", "trains-async"], ids=["P1", "P3"])
def test_p1_p3_c61_cancelled_while_it_trains(rig: Rig, worker: None, flow_name: str, ends: Ends) -> None:
    run = rig.launch(flow_name, flow_name)
    box = training(rig, run)
    rig.cancel(run)
    assert ends(run, box) == "finally"
    until(lambda: rig.state(run) == "CANCELLED", "a clean Cancelled")


def test_p2_cancelled_while_it_tears_down(rig: Rig, worker: None, ends: Ends) -> None:
    run = rig.launch("trains", "trains", slow="destroy")
    rig.reached(run, "in-destroy")
    box = rig.mark(run, "box").read_text()
    rig.cancel(run)
    assert ends(run, box) == "finally"
    until(lambda: rig.state(run) == "CANCELLED", "a clean Cancelled")


def test_p4_c61_cancelled_while_a_thread_of_its_trains(rig: Rig, worker: None, ends: Ends) -> None:
    run = rig.launch("submits", "submits")
    box = training(rig, run)
    rig.cancel(run)
    assert ends(run, box) in ("hook", "watchdog", "finally")


def test_p5_sigterm_to_the_flow(rig: Rig, worker: None, ends: Ends) -> None:
    run = rig.launch("trains", "trains")
    box = training(rig, run)
    os.kill(int(rig.reached(run, "rented")), signal.SIGTERM)
    assert ends(run, box) == "finally"


def test_p6_sigkill_to_the_flow(rig: Rig, worker: None, ends: Ends) -> None:
    run = rig.launch("trains", "trains")
    box = training(rig, run)
    os.kill(int(rig.reached(run, "rented")), signal.SIGKILL)
    assert ends(run, box) in ("watchdog", "hook")


def test_p12_c61_the_parent_of_a_subflow_cancelled(rig: Rig, worker: None, ends: Ends) -> None:
    run = rig.launch("parent", "parent")
    child = rig.reached(run, "child")
    box = training(rig, child)
    rig.cancel(run)
    assert ends(child, box) in ("finally", "hook")


def test_p11_the_flows_own_timeout(rig: Rig, worker: None, ends: Ends) -> None:
    run = rig.launch("times-out", "times-out")
    box = training(rig, run)
    assert ends(run, box) == "finally"
    until(lambda: rig.state(run) == "FAILED", "the run has failed")


def test_p13_each_attempt_of_a_retried_flow_gives_back(rig: Rig, worker: None, ends: Ends) -> None:
    run = rig.launch("retried", "retried")
    rig.reached(run, "attempt-2")
    until(lambda: rig.state(run) == "FAILED", "the run has failed")
    first, second = (rig.mark(run, f"box-{attempt}").read_text() for attempt in (1, 2))
    assert first != second
    assert ends(run, second) == "finally"
    assert not rig.job_processes(first)


def test_p7_sigterm_to_the_worker(rig: Rig, ends: Ends) -> None:
    rig.end_workers()
    worker = rig.worker("worker-2")
    run = rig.launch("trains", "trains")
    box = training(rig, run)
    worker.send_signal(signal.SIGTERM)
    assert ends(run, box) in ("watchdog", "finally")


def test_p8_sigkill_to_the_worker_and_then_a_cancel(rig: Rig, ends: Ends) -> None:
    rig.end_workers()
    worker = rig.worker("worker-3")
    run = rig.launch("trains", "trains")
    box = training(rig, run)
    worker.kill()
    worker.wait()
    rig.cancel(run)
    assert ends(run, box) == "finally", "the flow, an orphan now, asks Prefect whether it is still wanted"


def test_p9_served_and_cancelled(rig: Rig, ends: Ends) -> None:
    rig.end_workers()
    server = rig.run_python(FLOW_FILE, "serve", log="serve")
    until(lambda: rig.deployed("trains", "served"), "the flow is served")
    run = rig.launch("trains", "served")
    box = training(rig, run)
    rig.cancel(run)
    assert ends(run, box) == "finally"
    rig.end(server)


def test_p10_executed_in_a_container_that_is_stopped(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    rig.end_workers()
    run = rig.launch("trains", "trains")
    execution = rig.run_prefect("flow-run", "execute", run, log="execute")
    box = training(rig, run)
    flow_process = int(rig.reached(run, "rented"))
    watchdog = rig.watchdog(flow_process)
    execution.send_signal(signal.SIGTERM)
    # Nothing passes the signal on; with its first process the container ends, and the watchdog with it.
    for process in (watchdog, flow_process):
        os.kill(process, signal.SIGKILL)
    took_s = rig.gone(run, box, 30 + BOUND_S)
    with capsys.disabled():
        print(
            f"  P10: nothing left after {took_s:.1f} s, by the dead-man, whose heart had been silent for 30 s"
        )


def test_prefect_yaml_deploys_as_it_stands(rig: Rig) -> None:
    for arguments in (
        ["work-pool", "create", "gpu-flows", "--type", "process"],
        ["--no-prompt", "deploy", "--all"],
    ):
        done = rig.cli(*arguments, GPU_FLOWS_PROJECT=str(PROJECT))
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    nightly = rig.api("GET", "/deployments/name/gpu-flows digits/nightly")
    assert nightly["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"
    assert nightly["schedules"][0]["schedule"]["cron"] == "0 3 * * *"
    reaper = rig.api("GET", "/deployments/name/gpu-flows reap/reaper")
    assert reaper["schedules"][0]["schedule"]["interval"] == 900
    form = rig.api("GET", "/deployments/name/gpu-flows train/train")["parameter_openapi_schema"]
    assert "H100:8" in form["definitions"]["Preset"]["enum"]
    run = rig.launch("gpu-flows reap", "reaper", dry_run=True)
    rig.run_prefect("worker", "start", "--pool", "gpu-flows", log="yaml")
    until(lambda: rig.state(run) == "COMPLETED", f"the reaper runs\n{rig.logs(run)}", 120)
