"""One training in one task, on two boxes of this machine: the shortest DAG that trains and gives back.

Change ``gpus`` and add ``clouds=[...]`` to rent elsewhere; nothing else changes.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from airflow.sdk import dag, task


@dag(dag_id="gpu_flows_digits", schedule=None, catchup=False, tags=["gpu-flows"])
def digits() -> None:
    """Train a small network on handwritten digits."""

    @task(retries=2)
    def train(run_id: str | None = None) -> dict[str, Any]:
        from gpu_flows import run

        demo = find_spec("gpu_flows.demo")
        assert demo is not None
        assert demo.origin is not None
        report = run(
            "train_digits.py",
            code=Path(demo.origin).parent,
            gpus="cpu",
            nodes=2,
            outputs=["metrics.json", "outputs/*"],
            max_duration="20m",
            # Whatever kills this task, its boxes are found by this name.
            name=["airflow", "gpu_flows_digits", str(run_id), "train", "-1"],
        )
        if not report.ok:
            raise RuntimeError(report.sentence)
        return report.to_json()

    train()


dag_object = digits()
