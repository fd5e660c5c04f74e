"""One DAG for each row of the table of what Airflow really runs."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG

from airflow_provider import LaunchDDPOperator, gpu_box
from airflow_provider.operators.provision import ProvisionBoxOperator
from airflow_provider.operators.teardown import TeardownOperator


def _stalled(self: ProvisionBoxOperator, *_: Any) -> None:
    """Stand still after the create and before the XCom, for the rows in which a setup is hit there."""
    if self.dag_id in ("a06_setup_killed", "a07_marked_in_setup"):
        (Path(os.environ["GPU_FLOWS_HOME"]) / f"{self.dag_id}.pid").write_text(str(os.getpid()))
        time.sleep(600)


def _broken(self: TeardownOperator, context: Any) -> None:
    if self.dag_id == "a16_teardown_fails":
        raise RuntimeError("this teardown fails")
    return _teardown(self, context)


_teardown = TeardownOperator.execute
ProvisionBoxOperator._tell = _stalled
TeardownOperator.execute = _broken


def row(
    dag_id: str, *, job: str = "long.sh", deferrable: bool, dag: dict[str, Any] | None = None, **options: Any
) -> DAG:
    box_options = options.pop("box", {})
    with (
        DAG(dag_id, schedule=None, is_paused_upon_creation=False, **(dag or {})) as made,
        gpu_box("box", gpus="cpu", max_duration="20m", ready_timeout_s=60, **box_options) as box,
    ):
        LaunchDDPOperator(
            task_id="fit",
            box=box,
            code="jobs",
            entrypoint=job,
            deferrable=deferrable,
            **options,
        )
    return made


a02 = row("a02_work_killed", deferrable=False)
a03 = row("a03_marked_in_work", deferrable=False)
a04 = row("a04_marked_while_deferred", deferrable=True)
a04c = row("a04_cleared", job="ticks.sh", deferrable=True)
a06 = row("a06_setup_killed", deferrable=True)
a07 = row("a07_marked_in_setup", deferrable=True)
a08 = row("a08_dagrun_timeout", deferrable=True, dag={"dagrun_timeout": timedelta(seconds=90)})
a09 = row("a09_supervisor_killed", deferrable=False)
a10 = row("a10_paused", job="ticks.sh", deferrable=True, heartbeat_timeout_s=15)
a12 = row("a12_triggerer_restarted", job="ticks.sh", deferrable=True)
a13 = row("a13_execution_timeout", deferrable=True, execution_timeout=timedelta(seconds=30))
a14 = row("a14_scheduler_restarted", job="ticks.sh", deferrable=True)
a15 = row("a15_worker_dies", job="ticks.sh", deferrable=False, retries=1, retry_delay=timedelta(seconds=1))
a16 = row("a16_teardown_fails", job="quick.sh", deferrable=False, box={"teardown_retries": 0})
