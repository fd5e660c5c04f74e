from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_flows.training.commands import node_command
from gpu_flows.training.spec import TrainingSpec
from tests.training.nodes import Node

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "gpu_flows" / "demo" / "train_digits.py"


def check(out: Path, log: str, world_size: int) -> None:
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["accuracy"] > 0.95
    assert metrics["world_size"] == world_size
    assert (out / "model.pt").stat().st_size > 100_000
    assert log.startswith(f"{world_size} rank")
    assert log.count("held-out accuracy") == metrics["epochs"]


def test_the_demo_trains_in_one_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--epochs", "8"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    check(tmp_path / "outputs", done.stdout, world_size=1)


@pytest.mark.table
def test_the_demo_trains_on_four_ranks(node: Node) -> None:
    node.python, node.path = Path(sys.executable), ()
    (node.home / "code").mkdir()
    (node.home / "code" / SCRIPT.name).write_bytes(SCRIPT.read_bytes())
    plan = node_command(TrainingSpec(entrypoint=SCRIPT.name), node=0, nodes=1, nproc=4, code_dir="code")
    assert node.run(plan) == 0, node.log()
    check(node.home / "code" / "outputs", node.rank_log(0), world_size=4)
