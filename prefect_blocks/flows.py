"""Flows that can be deployed as they stand: one training, a sweep, and the reaper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect import flow
from prefect.futures import as_completed
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner

from gpu_flows.errors import BadRequest, GpuFlowsError
from gpu_flows.runs.steps import teardown_box
from gpu_flows.training.spec import TrainingSpec
from prefect_blocks import tasks
from prefect_blocks.accounts import open_installation, refs_of
from prefect_blocks.cleanup import CLEANUP
from prefect_blocks.forms import Cell, Renting, Training
from prefect_blocks.ledger import owner_in_flow
from prefect_blocks.telling import Courier

_WIDTH = 64
"""Most cells of a sweep at once."""
_THREADS: Any = ThreadPoolTaskRunner(max_workers=_WIDTH)


@flow(name="gpu-flows train", **CLEANUP)
def train(training: Training, renting: Renting | None = None, name: str = "train") -> dict[str, Any]:
    """Rent boxes, train on them, fetch the outputs, and give the boxes back.

    Args:
        training: What to run.
        renting: What to rent; processors of this machine unless given.
        name: Names the lease within the run.

    Returns:
        The report.
    """
    asked = (renting or Renting()).asked()
    fields = training.fields()
    report: dict[str, Any] = tasks.run(fields.pop("entrypoint"), name=name, key="0", **asked, **fields)
    return report


@flow(name="gpu-flows sweep", task_runner=_THREADS, **CLEANUP)
def sweep(
    training: Training,
    cells: list[Cell],
    renting: Renting | None = None,
    name: str = "sweep",
    at_once: int = 2,
) -> list[dict[str, Any]]:
    """Run one training for each cell, each on boxes of its own.

    Args:
        training: What all of them run.
        cells: What each has beyond that.
        renting: What to rent for each.
        name: Names the leases within the run.
        at_once: How many cells may hold boxes at the same time.

    Returns:
        The reports, in the order of the cells.

    Raises:
        BadRequest: When two cells are the same; nothing was rented.
        ExceptionGroup: When trainings failed; the others have been run to their end.
    """
    if not 1 <= at_once <= _WIDTH:
        raise BadRequest(f"at_once cannot be {at_once}: it is between 1 and {_WIDTH}")
    wanted = renting or Renting()
    calls = [_call(training, each, wanted) for each in cells]
    keys = [str(call["key"]) for call in calls]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise BadRequest(f"two cells have the key {twice[0]}", hint="make them differ, or give them keys")
    asked = wanted.asked()
    futures: list[Any] = []
    running: set[Any] = set()
    try:
        for call in calls:
            if len(running) >= at_once:
                running.discard(next(iter(as_completed(list(running)))))
            futures.append(tasks.run.submit(name=name, **asked, **call))
            running.add(futures[-1])
        results = [future.result(raise_on_failure=False) for future in futures]
    except BaseException:
        # The threads of the cells do not hear of a cancellation, and so do not give back by themselves.
        _give_back(name, keys, asked["clouds"])
        raise
    if failures := [each for each in results if isinstance(each, Exception)]:
        raise ExceptionGroup(f"{len(failures)} of {len(cells)} trainings failed", failures)
    return results


def _call(training: Training, cell: Cell, renting: Renting) -> dict[str, Any]:
    fields = training.fields()
    fields["args"] = [*training.args, *cell.args]
    fields["env"] = {**training.env, **cell.env}
    if cell.key is None:
        spec = TrainingSpec(**fields, nodes=renting.nodes, max_duration=renting.max_duration)
        fields["key"] = tasks.cell_key(spec.entrypoint, spec)
    else:
        fields["key"] = cell.key
    return fields


def _give_back(name: str, keys: Sequence[str], clouds: Any) -> None:
    """End the boxes of every cell; all are tried, whatever fails."""
    with Courier(get_run_logger()) as courier, open_installation(clouds, listener=courier.listen) as here:
        for key in keys:
            try:
                teardown_box(owner_in_flow(name, key), installation=here, clouds=refs_of(clouds))
            except GpuFlowsError as error:
                get_run_logger().error("boxes of cell %s may go on billing: %s", key, error)


@flow(name="gpu-flows reap")
def reap(clouds: list[str] | None = None, dry_run: bool = False) -> dict[str, Any]:
    """End the boxes that are past their deadline, and those whose flow run has ended; to be run on a schedule.

    Args:
        clouds: Where to look; every configured cloud unless given.
        dry_run: Only tell what would be ended.

    Returns:
        What is due, what was ended, and which clouds could not be asked.

    Raises:
        ReapFailed: When something may go on billing.
    """
    from gpu_flows.leases.reaper import Standing, survey
    from gpu_flows.leases.reaper import reap as end

    with Courier(get_run_logger()) as courier, open_installation(clouds, listener=courier.listen) as here:
        refs = clouds or here.configured_clouds()
        opened = here.clouds(refs)
        found = survey(
            opened,
            here.namespace(refs),
            journals=here.settings.journals,
            liveness=here.liveness,
            clock=here.clock,
        )
        due = [each for each in found.sightings if each.standing in (Standing.EXPIRED, Standing.ORPHANED)]
        ended = (
            []
            if dry_run
            else end(
                found, opened, journals=here.settings.journals, clock=here.clock, listener=courier.listen
            )
        )
        get_run_logger().info("%d boxes are due, %d ended and proven gone", len(due), len(ended))
        return {
            "run": str(flow_run.id),
            "dry_run": dry_run,
            "due": [each.to_json() for each in due],
            "ended": [box.to_json() for box in ended],
            "unknown": list(found.unknown),
        }


__all__ = ("reap", "sweep", "train")
