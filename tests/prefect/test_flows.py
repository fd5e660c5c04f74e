"""Renting and training within flows, on boxes of this machine, with a real Prefect server."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
import time
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, unmapped
from prefect.client.orchestration import get_client

from gpu_flows import BadRequest, TeardownFailed
from gpu_flows.runs import steps
from gpu_flows.training.causes import ScriptFailed
from prefect_blocks import CLEANUP, flows, tasks
from prefect_blocks.boxes import gpu_box
from prefect_blocks.forms import Cell, Renting, Training
from prefect_blocks.telling import Courier
from tests.end_to_end.conftest import Machine, until

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.sh").write_text('echo "learning rate $1"; echo "model $1" > model.txt\n')
    (folder / "fail.sh").write_text("echo no luck; exit 3\n")
    return folder


def artifacts(flow_run_id: str) -> dict[str, Any]:
    with get_client(sync_client=True) as client:
        answer = client._client.post(
            "/artifacts/filter", json={"artifacts": {"flow_run_id": {"any_": [flow_run_id]}}}
        )
    return {each["key"]: each for each in answer.json()}


def logged(flow_run_id: str) -> str:
    body = {"logs": {"flow_run_id": {"any_": [flow_run_id]}}, "sort": "TIMESTAMP_DESC", "limit": 50}
    with get_client(sync_client=True) as client:
        answer = client._client.post("/logs/filter", json=body)
    return "\n".join(each["message"] for each in answer.json())


def test_a_flow_rents_trains_and_gives_back(machine: Machine, code: Path) -> None:
    @flow
    def retrain() -> dict[str, Any]:
        with gpu_box("train", gpus=["cpu:2", "cpu"], clouds=["local"], max_duration="5m") as box:
            assert len(machine.boxes()) == 1
            assert pickle.loads(pickle.dumps(box)).to_json() == json.loads(json.dumps(box.to_json()))
            return tasks.launch_ddp(box, "train.sh", code=code, args=["0.1"], outputs=["model.txt"])

    state = retrain(return_state=True)
    report = state.result()
    assert machine.boxes() == []
    (output,) = report["outputs"]
    assert Path(output).read_text() == "model 0.1\n"
    run = str(state.state_details.flow_run_id)
    shown = artifacts(run)
    assert json.loads(shown["gpu-flows-train-offers"]["data"])[0]["result"] == "OK"
    assert "1 ended and proven gone" in shown["gpu-flows-train-report"]["data"]
    assert "$0.00" in shown["gpu-flows-train-report"]["data"]
    assert shown["gpu-flows-train-progress"]["data"] == 100.0


def test_the_steps_as_tasks(machine: Machine, code: Path) -> None:
    asked: dict[str, Any] = {"gpus": "cpu", "clouds": ["local"], "max_duration": "5m"}

    @flow
    def one_by_one() -> list[Any]:
        offers = tasks.resolve_gpu(**asked)
        reserved = tasks.reserve("steps", **asked)
        box = tasks.provision_box(reserved, **asked)
        again = tasks.provision_box(reserved, **asked)
        assert [each.id for each in machine.boxes()] == [again["lease"]["boxes"][0]["box"]["id"]]
        report = tasks.launch_ddp(box, "train.sh", code=code, args="1")
        return [offers, report, tasks.teardown_box(box), tasks.teardown_box("steps", clouds="local")]

    offers, report, ended, again = one_by_one()
    assert offers["offers"][0]["cloud"] == "local"
    assert report["ok"]
    assert (len(ended["ended"]), len(again["ended"])) == (1, 0)
    assert machine.boxes() == []


def test_a_training_that_fails_fails_the_flow_by_its_name_and_is_not_repeated(
    machine: Machine, code: Path
) -> None:
    @flow
    def retrain() -> None:
        with gpu_box("train", gpus="cpu", max_duration="5m") as box:
            tasks.launch_ddp(box, "fail.sh", code=code)

    state = retrain(return_state=True)
    assert state.is_failed()
    with pytest.raises(ScriptFailed):
        state.result()
    assert machine.boxes() == []
    run = str(state.state_details.flow_run_id)
    assert "script error" in artifacts(run)["gpu-flows-train-report"]["data"]
    (report,) = machine.home.glob("runs/*/report.json")
    assert json.loads(report.read_text())["exit_code"] == 3


def test_what_is_not_proven_gone_is_said_beside_the_first_error(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(owner: Any, **_: Any) -> None:
        raise TeardownFailed("the cloud is away", ended=(), failures=["local cannot be asked"])

    @flow
    def unlucky() -> None:
        with gpu_box("train", gpus="cpu", max_duration="5m"):
            monkeypatch.setattr(steps, "teardown_box", fails)
            raise RuntimeError("a bug")

    state = unlucky(return_state=True)
    with pytest.raises(RuntimeError, match="a bug"):
        state.result()
    report = artifacts(str(state.state_details.flow_run_id))["gpu-flows-train-report"]["data"]
    assert "These may go on billing" in report


def test_two_scopes_of_one_name_at_once_are_an_error(machine: Machine) -> None:
    @flow
    def twice() -> None:
        with gpu_box("same", gpus="cpu"), gpu_box("same", gpus="cpu"):
            pass

    with pytest.raises(BadRequest, match="another name or key"):
        twice()
    assert machine.boxes() == []


def test_without_a_flow_run_nothing_is_rented(machine: Machine) -> None:
    with pytest.raises(BadRequest, match="needs a flow run"), gpu_box("train", gpus="cpu"):
        pass


def test_a_sweep_gives_each_cell_boxes_of_its_own(machine: Machine, code: Path) -> None:
    training = Training(entrypoint="train.sh", code=str(code), outputs=["model.txt"])
    cells = [Cell(args=["0.1"]), Cell(args=["0.2"], key="second")]
    asked = Renting(max_duration="5m", limit="gpus")
    with get_client(sync_client=True) as client:
        client._client.post("/v2/concurrency_limits/", json={"name": "gpus", "limit": 1})
    reports = flows.sweep(training, cells, asked)
    assert [Path(each["outputs"][0]).read_text() for each in reports] == ["model 0.1\n", "model 0.2\n"]
    keys = [each["owner"][3] for each in reports]
    assert keys[1] == "second"
    assert len({each["lease"] for each in reports}) == 2
    assert machine.boxes() == []
    # Two cells may run at once, and the limit lets one box at a time.
    first, second = sorted((each["ended"][0] for each in reports), key=lambda box: box["created_at"])
    assert first["ended_at"] <= second["created_at"]
    with pytest.raises(BadRequest, match="two cells have the key"):
        flows.sweep(training, [Cell(), Cell()], asked)


@pytest.mark.table
def test_a_mapped_task_is_a_sweep_too(machine: Machine, code: Path) -> None:
    @flow
    def mapped() -> list[Any]:
        rates = [["1"], ["2"]]
        return tasks.run.map(
            "train.sh", gpus=unmapped("cpu"), code=unmapped(code), args=rates, max_duration="5m"
        ).result()

    assert len({each["owner"][3] for each in mapped()}) == 2
    assert machine.boxes() == []


def test_the_reaper_ends_what_an_ended_flow_run_left(machine: Machine) -> None:
    @flow
    def forgets() -> Any:
        return tasks.provision_box(tasks.reserve("left", "cpu", max_duration="5m"), "cpu", max_duration="5m")

    forgets()
    (left,) = machine.boxes()
    seen = flows.reap(["local"], dry_run=True)
    assert [each["id"] for each in seen["due"]] == [left.id]
    assert seen["ended"] == []
    assert [each["id"] for each in flows.reap(["local"])["ended"]] == [left.id]
    assert machine.boxes() == []


def test_the_hook_of_a_failed_flow_ends_what_its_tasks_left(machine: Machine) -> None:
    @flow(**CLEANUP)
    def forgets() -> None:
        tasks.provision_box(tasks.reserve("left", "cpu", max_duration="5m"), "cpu", max_duration="5m")
        assert len(machine.boxes()) == 1
        raise RuntimeError("lost the thread")

    state = forgets(return_state=True)
    assert state.is_failed()
    assert machine.boxes() == []


@pytest.mark.table
def test_the_example_with_two_jobs(machine: Machine) -> None:
    from dags_examples.prefect_two_jobs import two_jobs

    first, second = two_jobs()
    assert [Path(each["outputs"][0]).read_text() for each in (first, second)] == [
        "loss at 0.1\n",
        "loss at 0.01\n",
    ]
    assert first["lease"] == second["lease"]
    assert machine.boxes() == []


def test_an_async_flow_shows_the_same(machine: Machine, code: Path) -> None:
    @flow
    async def retrain() -> Any:
        return tasks.run("train.sh", gpus="cpu", code=code, args=["0.1"], max_duration="5m")

    state = asyncio.run(retrain(return_state=True))
    report = state.result(_sync=True)
    assert report["cost"] == {"usd": 0.0, "exact": True}
    assert len(report["ended"]) == 1
    assert {"gpu-flows-train-offers", "gpu-flows-train-report"} <= {
        re.sub(r"-[0-9a-f]{10}-", "-", key) for key in artifacts(str(state.state_details.flow_run_id))
    }
    assert machine.boxes() == []


@pytest.mark.table
def test_a_hundred_thousand_lines_do_not_slow_the_run_and_the_file_is_whole(
    machine: Machine, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code / "loud.sh").write_text("seq -f 'step %.0f of a training with a line of a usual length' 100000\n")

    @flow
    def loud() -> Any:
        return tasks.run("loud.sh", gpus="cpu", code=code, max_duration="5m")

    def timed() -> tuple[float, dict[str, Any]]:
        began = time.monotonic()
        report = loud()
        return time.monotonic() - began, report

    shown = [timed() for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(Courier, "show", lambda *_: None)
        silent = [timed() for _ in range(2)]
    # The better of two each: the job, the server and this process share the machine's processors.
    (shown_s, _), (silent_s, _) = (min(runs, key=lambda run: run[0]) for runs in (shown, silent))
    trained_s = [min(report["seconds"]["train"] for _, report in runs) for runs in (shown, silent)]
    print(f"the flow took {shown_s:.2f} s shown, {silent_s:.2f} s silent; its job", *trained_s)
    for _, each in shown:
        (log,) = Path(each["folder"]).glob("logs/*/rank-0.log")
        assert len(log.read_text().splitlines()) >= 100_000
    assert silent_s > 0.8 * shown_s
    until(lambda: "step 100000 of" in logged(shown[-1][1]["owner"][1]), "the last line is on the server", 60)
