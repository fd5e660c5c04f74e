"""Every ten minutes: end the boxes of this installation that are past their deadline or whose run has ended.

A file of its own, so that no mistake in another DAG keeps it from being loaded. Beside it, let cron run
``gpu-flows reap --yes`` on some other machine: a scheduler that is down reaps nothing.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG

from airflow_provider import ReapOperator

with DAG(
    dag_id="gpu_flows_reaper",
    schedule="*/10 * * * *",
    catchup=False,
    max_active_runs=1,
    is_paused_upon_creation=False,
    tags=["gpu-flows"],
) as dag_object:
    ReapOperator(task_id="reap", retries=2, retry_delay=timedelta(seconds=30))
