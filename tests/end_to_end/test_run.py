"""Whole runs on boxes of the local cloud: what a user sees of each way that a run can go."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gpu_flows import Following, Installation, RunReport, run
from gpu_flows.clouds import open_cloud
from gpu_flows.progress import Progress
from tests.end_to_end.conftest import Machine, until


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


class Watched:
    """A run in this process, with everything that it told."""

    def __init__(self) -> None:
        self.told: list[Progress] = []
        self.lines: list[str] = []
        self.seen = threading.Event()

    def run(self, code: Path, script: str = "train.sh", **parameters: Any) -> RunReport:
        following = parameters.pop("following", {})
        return run(
            script,
            code=code,
            gpus=parameters.pop("gpus", "cpu"),
            max_duration=parameters.pop("max_duration", "10m"),
            installation=Installation(listener=self.told.append),
            following=Following(show_line=self._show, **following),
            **parameters,
        )

    def _show(self, _: str, line: str) -> None:
        self.lines.append(line)
        if "training" in line:
            self.seen.set()


def test_c33_the_end_of_a_failed_run_is_shown_and_named(machine: Machine, tmp_path: Path) -> None:
    script = "import sys\nfor n in range(100): print('line', n)\nraise RuntimeError('the data is odd')\n"
    code = write(tmp_path / "code", {"train.py": script})
    watched = Watched()
    report = watched.run(code, "train.py", launcher="python", outputs=["*.py", "missing/*"])
    assert not report.ok
    assert report.cause == "script_error"
    assert report.exit_code == 1
    assert "the data is odd" in report.sentence
    assert "RuntimeError: the data is odd" in report.traceback
    assert watched.lines.count("line 99") == 1
    assert any("RuntimeError: the data is odd" in line for line in watched.lines)
    # The outputs are fetched also from a run that failed.
    assert [Path(path).name for path in report.outputs] == ["train.py"]
    assert any("missing/*" in line for line in report.not_fetched)
    assert len(report.ended) == 1
    assert report.left == []
    assert machine.boxes() == []


def test_c35_the_node_that_failed_is_named_and_the_others_are_stopped(
    machine: Machine, tmp_path: Path
) -> None:
    script = 'echo training; [ "$GPU_FLOWS_NODE_RANK" = 1 ] || { sleep 600; exit; }\nsleep 1\nexit 37\n'
    code = write(tmp_path / "code", {"train.sh": script})
    began = time.monotonic()
    report = Watched().run(code, nodes=2)
    assert time.monotonic() - began < 60
    assert report.exit_code == 37
    assert "node 1" in report.sentence
    assert {node.node: node.cause for node in report.nodes} == {0: "stopped", 1: "script_error"}
    assert machine.boxes() == []
    assert machine.processes() == {}


def test_c51_no_secret_is_left_anywhere(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = {
        "HF_TOKEN": "hf_inventedA1longenough",
        "MY_DB_URI": "pg://u:pw9secret@h/x",
        "WANDB_API_KEY": "wb-4711-invented",
    }
    monkeypatch.setenv("WANDB_API_KEY", planted["WANDB_API_KEY"])
    script = (
        "import os, subprocess\n"
        "print('training with', os.environ['HF_TOKEN'], os.environ['WANDB_API_KEY'])\n"
        "print(subprocess.run(['ps', '-eo', 'args'], capture_output=True, text=True).stdout.count('inventedA1'))\n"
        "raise ValueError('cannot log in as ' + os.environ['MY_DB_URI'])\n"
    )
    code = write(tmp_path / "code", {"train.py": script})
    watched = Watched()
    report = watched.run(
        code,
        "train.py",
        launcher="python",
        env={"HF_TOKEN": planted["HF_TOKEN"], "MY_DB_URI": planted["MY_DB_URI"]},
        secrets=["WANDB_API_KEY"],
    )
    assert report.cause == "script_error"
    assert "0" in watched.lines, "a secret stood in a command line of the box"
    assert any("training with *** ***" in line for line in watched.lines)
    spoken = json.dumps(report.to_json()) + repr(watched.told) + "\n".join(watched.lines) + str(report)
    stored = {path: path.read_bytes() for path in machine.home.rglob("*") if path.is_file()}
    assert any(path.name == "rank-0.log" for path in stored)
    for name, value in planted.items():
        assert value not in spoken, name
        assert [path for path, data in stored.items() if value.encode() in data] == [], name


def test_two_runs_at_once_do_not_get_into_each_others_way(machine: Machine, tmp_path: Path) -> None:
    code = write(tmp_path / "code", {"train.sh": "echo training; echo $GPU_FLOWS_NODE_RANK > out.txt\n"})
    with ThreadPoolExecutor(4) as pool:
        reports = list(
            pool.map(lambda n: Watched().run(code, nodes=2, name=f"run-{n}", outputs=["out.txt"]), range(4))
        )
    assert all(report.ok for report in reports), [report.sentence for report in reports]
    assert len({report.lease for report in reports}) == 4
    assert machine.boxes() == []


def take_boxes_away(watched: Watched) -> threading.Thread:
    """Destroy the boxes behind a run's back, as soon as its job works."""

    def take_away() -> None:
        assert watched.seen.wait(60)
        cloud = open_cloud("local")
        for box in cloud.find("gf1-"):
            cloud.destroy(box)

    thief = threading.Thread(target=take_away)
    thief.start()
    return thief


def test_a_box_that_is_taken_away_is_preemption_and_not_a_failure(machine: Machine, tmp_path: Path) -> None:
    code = write(tmp_path / "code", {"train.sh": "echo training; sleep 600\n"})
    watched = Watched()
    thief = take_boxes_away(watched)
    report = watched.run(code, following={"max_preemptions": 0})
    thief.join()
    assert report.cause == "preempted"
    assert machine.boxes() == []


def test_c53_a_preempted_run_goes_on_elsewhere_within_its_own_budget(
    machine: Machine, tmp_path: Path
) -> None:
    script = f"echo training; [ -e {tmp_path}/taken ] && exit 0; touch {tmp_path}/taken; sleep 600\n"
    code = write(tmp_path / "code", {"train.sh": script})
    watched = Watched()
    thief = take_boxes_away(watched)
    report = watched.run(code, nodes=2)
    thief.join()
    assert report.ok, report.sentence
    assert report.preemptions == 1
    assert [attempt.code for attempt in report.attempts] == ["OK", "OK"]
    assert watched.lines.count("training") == 2, "each attempt's log is shown from its first byte"
    assert len(report.ended) == 4
    assert machine.boxes() == []


def test_c53_a_failure_of_the_script_is_not_tried_again(machine: Machine, tmp_path: Path) -> None:
    code = write(tmp_path / "code", {"train.sh": "echo training; exit 1\n"})
    report = Watched().run(code)
    assert (report.cause, report.preemptions, len(report.attempts)) == ("script_error", 0, 1)


def test_the_same_name_on_another_day_is_another_log(machine: Machine, tmp_path: Path) -> None:
    code = write(tmp_path / "code", {"train.sh": "echo training; date +%N\n"})
    first, second = Watched(), Watched()
    assert first.run(code, name="nightly").ok
    assert second.run(code, name="nightly").ok
    assert first.lines[:2] == second.lines[:2]
    assert first.lines[1] == "training"
    assert len(first.lines) == len(second.lines) == 3
    assert first.lines[2] != second.lines[2]


def test_a_job_ends_at_its_max_duration(machine: Machine, tmp_path: Path) -> None:
    code = write(tmp_path / "code", {"train.sh": "echo training; sleep 600 & sleep 600\n"})
    report = Watched().run(code, max_duration=3)
    assert report.cause == "deadline"
    assert report.seconds["train"] < 40
    assert machine.processes() == {}


def test_a_detached_run_is_found_again_and_followed_to_its_end(machine: Machine, tmp_path: Path) -> None:
    code = write(tmp_path / "code", {"train.sh": "echo training; sleep 2; echo done\n"})
    first = Watched().run(code, name="apart", following={"detach": True})
    assert first.cause == "running"
    assert first.detached
    assert len(machine.boxes()) == 1
    watched = Watched()
    second = watched.run(code, name="apart", outputs=["train.sh"])
    assert second.ok, second.sentence
    assert any(told.kind == "job.reattached" for told in watched.told)
    assert watched.lines[-2:] == ["training", "done"], "the whole log, from its first byte"
    assert machine.boxes() == []


@pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("ss"), reason="cutting connections takes root and ss"
)
def test_a_lost_connection_costs_nothing(machine: Machine, tmp_path: Path) -> None:
    """The servers' connections are cut again and again; the job goes on and no line is lost."""
    lines = 300
    code = write(
        tmp_path / "code",
        {"train.sh": f"echo training; for n in $(seq {lines}); do echo $n; sleep 0.01; done\n"},
    )
    watched = Watched()

    def cut() -> None:
        assert watched.seen.wait(60)
        for _ in range(3):
            # The TCP connections of the box's server are reset from outside.
            for box in open_cloud("local").find("gf1-"):
                if box.endpoint is not None:
                    subprocess.run(["ss", "-K", "dst", box.endpoint.host], capture_output=True)
            time.sleep(0.5)

    cutter = threading.Thread(target=cut)
    cutter.start()
    report = watched.run(code)
    cutter.join()
    assert report.ok, report.sentence
    assert any(told.kind == "connection.lost" for told in watched.told), "nothing was cut"
    assert [line for line in watched.lines if line.isdigit()] == [str(n + 1) for n in range(lines)]


def test_nothing_is_rented_when_something_is_missing(machine: Machine, tmp_path: Path) -> None:
    from gpu_flows import BadRequest

    code = write(tmp_path / "code", {"train.sh": "true\n"})
    wrong: list[dict[str, Any]] = [
        {"script": "trian.sh"},
        {"secrets": ["NOT_SET_ANYWHERE"]},
        {"gpus": "H10:8"},
        {"clouds": ["locall"]},
        {"price_cpa": 3},
        {"max_duration": "soon"},
        {"nodes": 0},
    ]
    for parameters in wrong:
        with pytest.raises(BadRequest):
            Watched().run(code, **{"script": "train.sh", **parameters})
    assert not (machine.home / "journal").exists()
    assert machine.boxes() == []


def test_offers_that_do_not_fit_are_explained(machine: Machine, tmp_path: Path) -> None:
    code = write(tmp_path / "code", {"train.sh": "true\n"})
    report = Watched().run(code, gpus="cpu:4000")
    assert report.cause == "CAPACITY_UNAVAILABLE"
    assert "4000" in report.sentence
    assert report.ended == []


def test_the_watchdog_of_a_finished_run_is_gone(machine: Machine, tmp_path: Path) -> None:
    code = write(tmp_path / "code", {"train.sh": "true\n"})
    report = Watched().run(code)
    assert report.ok
    from tests.end_to_end.test_kill_table import watchdogs

    until(lambda: not watchdogs(machine.home), "the watchdog has ended", 10)
    assert machine.processes() == {}
