"""A sweep: each cell is one task with a box of its own, and the slots of a pool bound how many there are at once.

`GpuTrainOperator` keeps its slot until its box is given back, so the bound holds.
"""

from __future__ import annotations

from importlib.util import find_spec

from airflow.sdk import DAG

from airflow_provider import GpuTrainOperator

demo = find_spec("gpu_flows.demo")
assert demo is not None
assert demo.submodule_search_locations is not None

with DAG(dag_id="gpu_flows_sweep", schedule=None, catchup=False, tags=["gpu-flows"]) as dag_object:
    GpuTrainOperator.partial(
        task_id="cell",
        gpus="cpu",
        code=demo.submodule_search_locations[0],
        entrypoint="train_digits.py",
        outputs=["metrics.json"],
        max_duration="20m",
        max_active_tis_per_dag=2,
    ).expand(args=[["--epochs", "1"], ["--epochs", "2"]])
