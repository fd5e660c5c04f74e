"""The demo: a real training run on two boxes of this machine, with nothing configured, and nothing left of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from gpu_flows.runs.report import RunReport
from tests.cli.conftest import Cli


def processes_of(folder: Path) -> dict[int, str]:
    """Return every living process whose environment or command line names a folder."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder / "state" / "local").encode() in text:
                found[int(entry.name)] = text.decode(errors="replace")[-200:]
    return found


def test_the_demo_trains_on_two_boxes_and_leaves_nothing(
    cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Limits on what may be rented do not concern boxes that cost nothing.
    monkeypatch.setenv("GPU_FLOWS_ENABLED_CLOUDS", "runpod")
    said = cli("demo", "--format", "json")
    assert said.code == 0, said.err
    report = said.json
    assert report["ok"] is True
    assert report["left"] == []
    assert len(report["ended"]) == 2
    assert [node["ranks"] for node in report["nodes"]] == [{"0": 0, "1": 0}, {"2": 0, "3": 0}]
    [folder] = Path("runs/demo").iterdir()
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["accuracy"] > 0.95
    assert metrics["world_size"] == 4
    assert (folder / "model.pt").stat().st_size > 10_000
    for text in (
        "4 ranks on cpu",
        "held-out accuracy",
        "on digits that it had never seen",
        str(folder / "model.pt"),
    ):
        assert text in said.err
    assert processes_of(home) == {}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Let the run of the demo be one that only says that it went well, with these metrics."""
    metrics: dict[str, Any] = {"accuracy": 0.99}

    def run(*_: object, name: Any, installation: Any, outputs_to: Path, **__: object) -> RunReport:
        outputs_to.mkdir(parents=True)
        (outputs_to / "metrics.json").write_text(json.dumps(metrics))
        report = RunReport(
            owner=name,
            lease="a" * 12,
            namespace="test",
            request="cpu:2",
            cause="succeeded",
            sentence="the training succeeded",
            started_at=installation.clock.now(),
        )
        return dataclasses.replace(report, **metrics.get("report", {}))

    monkeypatch.setattr("gpu_flows.runs.run.run", run)
    return metrics


def test_a_demo_that_does_not_learn_has_failed(cli: Cli, trained: dict[str, Any]) -> None:
    assert cli("demo", "--folder", "well").code == 0
    trained["accuracy"] = 0.12
    said = cli("demo", "--folder", "badly")
    assert said.code == 1
    assert "the accuracy is 0.1200, not above 0.95" in said.err


def test_a_demo_whose_training_failed_shows_the_report(cli: Cli, trained: dict[str, Any]) -> None:
    trained["report"] = {"cause": "script_error", "sentence": "rank 2 exited with code 1", "boxes": None}
    said = cli("demo", "--folder", "failed")
    assert said.code != 0
    assert "rank 2 exited with code 1" in said.out


def test_without_its_extra_the_demo_names_the_pip_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "sklearn" else found(name, *more)
    )
    said = cli("demo")
    assert said.code == 2
    assert "scikit-learn is not installed" in said.err
    assert "pip install 'gpu-flows[demo]'" in said.err
