"""DAGs of the tests: small jobs on boxes of this machine."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, task_group

from airflow_provider import (
    GpuAvailableSensor,
    GpuTrainOperator,
    LaunchDDPOperator,
    ReapOperator,
    ResolveGpuOperator,
    gpu_box,
)

with (
    DAG("whole", schedule=None) as whole,
    gpu_box("box", gpus="cpu:2", max_duration=timedelta(minutes=5)) as box,
):
    LaunchDDPOperator(
        task_id="fit",
        box=box,
        code="jobs",
        entrypoint="fit.sh",
        args=["{{ run_id }}", "two words"],
        secrets={"HUB_TOKEN": "conn:hub"},
        outputs=["model.txt"],
        outputs_to="file://{{ var.value.store }}/models",
        deferrable=False,
    )

with DAG("deferred", schedule=None) as deferred, gpu_box("box", gpus="cpu", max_duration="5m") as box:
    LaunchDDPOperator(
        task_id="fit", box=box, code="jobs", entrypoint="burst.sh", outputs=["model.txt"], deferrable=True
    )

with DAG("failing", schedule=None) as failing, gpu_box("box", gpus="cpu", max_duration="5m") as box:
    LaunchDDPOperator(task_id="fit", box=box, code="jobs", entrypoint="fail.sh", deferrable=True)

with (
    DAG("nothing_to_rent", schedule=None) as nothing_to_rent,
    gpu_box("box", gpus="cpu", clouds=["local"], price_cap=0.0, max_duration="5m", regions=["moon"]) as box,
):
    LaunchDDPOperator(task_id="fit", box=box, code="jobs", entrypoint="fit.sh", deferrable=False)

with DAG("sweep", schedule=None) as sweep:

    @task_group
    def cell(word: str) -> None:
        with gpu_box("box", gpus="cpu", max_duration="5m") as box:
            LaunchDDPOperator(
                task_id="fit", box=box, code="jobs", entrypoint="fit.sh", args=[word], deferrable=False
            )

    cell.expand(word=["left", "right"])

with DAG("in_one", schedule=None) as in_one:
    look = ResolveGpuOperator(task_id="look", gpus="cpu")
    wait = GpuAvailableSensor(task_id="wait", gpus="cpu", deferrable=True, poll_interval=1)
    train = GpuTrainOperator(
        task_id="train", gpus="cpu", code="jobs", entrypoint="fit.sh", args=["x"], max_duration="5m"
    )
    stay = GpuAvailableSensor(task_id="stay", gpus="cpu", deferrable=False)
    look >> wait >> stay >> train >> ReapOperator(task_id="reap", clouds=["local"])
