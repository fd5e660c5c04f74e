"""A box for the length of a task group: two nodes train with DDP, and the worker slot is free meanwhile.

On GPUs: ``gpus=["H100:8", "A100-80GB:8"], clouds=["aws", "runpod@team_a"], price_cap=40``. The alternatives
are tried in this order, over all clouds, and whatever becomes of the run, the box is given back.
"""

from __future__ import annotations

from datetime import timedelta
from importlib.util import find_spec

from airflow.sdk import DAG

from airflow_provider import LaunchDDPOperator, gpu_box

demo = find_spec("gpu_flows.demo")
assert demo is not None
assert demo.submodule_search_locations is not None

with (
    DAG(dag_id="gpu_flows_box", schedule=None, catchup=False, tags=["gpu-flows"]) as dag_object,
    gpu_box("train", gpus="cpu", nodes=2, max_duration=timedelta(minutes=20)) as box,
):
    fit = LaunchDDPOperator(
        task_id="fit",
        box=box,
        code=demo.submodule_search_locations[0],
        entrypoint="train_digits.py",
        outputs=["metrics.json"],
        deferrable=True,
        retries=2,
    )
