"""A box for the length of a task group."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import TaskGroup

from airflow_provider.boxes import HeldBox
from airflow_provider.operators.provision import ProvisionBoxOperator, ReserveBoxOperator, plain
from airflow_provider.operators.teardown import TeardownOperator

if TYPE_CHECKING:
    from airflow.sdk import DAG

_TEARDOWN_PRIORITY = 1_000
"""A box that waits to be given back costs money; what waits to begin does not."""


@contextmanager
def gpu_box(
    name: str,
    *,
    gpus: Any,
    clouds: Sequence[str] | str | None = None,
    max_duration: timedelta | float | str = timedelta(hours=24),
    nodes: int | str = 1,
    max_cost: float | str | None = None,
    deferrable: bool | None = None,
    teardown_retries: int = 8,
    teardown_pool: str | None = None,
    group: Mapping[str, Any] | None = None,
    **parameters: Any,
) -> Iterator[HeldBox]:
    """Hold boxes for the tasks that are made within the ``with`` block, as a task group.

    The group reserves the lease, rents, runs the tasks, tears down whatever happens, and has a gate at its
    end which fails when the work or the teardown has failed, so that the run does.

    Args:
        name: Id of the group; with the run it names the box, so that every task finds it.
        gpus: A request such as ``"H100:8"``, or a list of them in order of preference.
        clouds: Where to ask, in order; ``runpod@team_a`` takes the connection ``team_a``.
        max_duration: Of the job; the box lives a little longer.
        nodes: Number of boxes.
        max_cost: Dollars for the whole run.
        deferrable: Free the worker slot while there is no capacity; Airflow's default unless given.
        teardown_retries: How often the teardown is tried again, with growing pauses.
        teardown_pool: A pool of its own for the teardown, so that nothing can stand before it.
        group: Further arguments of the `TaskGroup`.
        **parameters: Of `RentingOperator`, and of every operator (``retries``, ``pool``).

    Yields:
        What the tasks within take as ``box=``.
    """
    from airflow.providers.standard.operators.empty import EmptyOperator

    with TaskGroup(group_id=name, **(group or {})) as tasks:
        _warn(tasks.dag, name)
        mapped = next(iter(tasks.iter_mapped_task_groups()), None) is not None
        box = HeldBox(
            name=tasks.group_id,
            mapped=mapped,
            provision=tasks.child_id("provision"),
            **plain(
                {
                    "gpus": gpus,
                    "clouds": clouds,
                    "max_duration": max_duration,
                    "nodes": nodes,
                    "max_cost": max_cost,
                }
            ),
        )
        renting = {
            "box": box,
            "gpus": gpus,
            "clouds": clouds,
            "max_duration": max_duration,
            "nodes": nodes,
            "max_cost": max_cost,
            **parameters,
        }
        reserve = ReserveBoxOperator(task_id="reserve", **renting)
        provision = ProvisionBoxOperator(task_id="provision", deferrable=deferrable, **renting)
        reserve >> provision
        before = {reserve.task_id, provision.task_id}
        yield box
        roots, leaves = _ends([task for task in tasks.iter_tasks() if task.task_id not in before])
        in_pool: dict[str, Any] = {"pool": teardown_pool} if teardown_pool else {}
        teardown = TeardownOperator(
            task_id="teardown",
            box=box,
            retries=teardown_retries,
            retry_delay=timedelta(seconds=15),
            retry_exponential_backoff=True,
            max_retry_delay=timedelta(minutes=10),
            priority_weight=_TEARDOWN_PRIORITY,
            weight_rule="absolute",
            **in_pool,
        )
        gate = EmptyOperator(task_id="gate")
        for root in roots:
            provision >> root
        for leaf in leaves or [provision]:
            leaf >> [teardown, gate]
        # With both as its setups it runs as soon as there is a lease, whatever becomes of the renting.
        teardown.as_teardown(setups=[reserve, provision])
        teardown >> gate


def _ends(tasks: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the tasks that no other one of them precedes, and those that none follows."""
    ids = {task.task_id for task in tasks}
    roots = [task for task in tasks if not task.upstream_task_ids & ids]
    leaves = [task for task in tasks if not task.downstream_task_ids & ids]
    return roots, leaves


def _warn(dag: DAG, name: str) -> None:
    if dag is not None and dag.dagrun_timeout is not None:
        warnings.warn(
            f"{dag.dag_id}: at its dagrun_timeout Airflow skips teardowns, so the box of {name} would live on until "
            "the reaper or its own deadline ends it; use max_duration instead",
            UserWarning,
            stacklevel=4,
        )
