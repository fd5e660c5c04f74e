"""The flows of the rows: deployed to a real worker, each rents a box of this machine and trains until it is ended."""

from __future__ import annotations

import os
import sys
import time
from functools import wraps
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.runtime import flow_run

from gpu_flows import TeardownFailed
from gpu_flows.clouds.local.cloud import LocalCloud
from prefect_blocks import CLEANUP, GpuBox, gpu_box, launch_ddp

PROJECT = Path(__file__).parents[2]
JOB = "echo training; touch {mark}; exec sleep 900"
SLOW_S = 3.0
"""A cancel reaches the flow's process within half a second."""


def mark_of(run: str, what: str) -> Path:
    return Path(os.environ["ROWS_MARKS"]) / f"{run}.{what}"


def mark(what: str) -> None:
    """Tell the test that a point is reached, and by which process."""
    mark_of(str(flow_run.id), what).write_text(str(os.getpid()))


def slowly(name: str) -> None:
    """Let a call of the cloud take as long as a real one may: a cancel comes while it is on its way."""
    original = getattr(LocalCloud, name)

    @wraps(original)
    def slow(self: Any, *args: Any) -> Any:
        outcome = original(self, *args) if name == "create" else None
        mark(f"in-{name}")
        deadline = time.monotonic() + 60
        while not mark_of(str(flow_run.id), "cancelled").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(SLOW_S)
        return outcome if name == "create" else original(self, *args)

    setattr(LocalCloud, name, slow)


def hold(trains: bool = True) -> None:
    mark("began")
    try:
        with gpu_box("row", gpus="cpu", max_duration="15m") as box:
            mark_of(str(flow_run.id), "box").write_text(box.boxes[0].box.id)
            mark("rented")
            if trains:
                train(box)
    except TeardownFailed:
        raise
    except BaseException:
        # The last records of a process that ends by a signal do not always reach the server; this does.
        mark("gave-back")
        raise
    mark("gave-back")


def train(box: GpuBox) -> None:
    line = JOB.format(mark=mark_of(str(flow_run.id), "training"))
    # The heart beats every five seconds, so that an owner that has ended is noticed within as many.
    launch_ddp(box, line, launcher="command", code=Path(__file__).parent / "row_code", heartbeat_timeout_s=30)


@flow(**CLEANUP)
def trains(slow: str = "") -> None:
    if slow:
        slowly(slow)
    hold(trains=slow != "destroy")


@flow(**CLEANUP)
async def trains_async() -> None:
    hold()


@task
def holds() -> None:
    hold()


@flow(**CLEANUP)
def submits() -> None:
    holds.submit().result()


@flow(timeout_seconds=15, **CLEANUP)
def times_out() -> None:
    hold()


@flow
def child() -> None:
    # The test knows the parent alone.
    mark_of(str(flow_run.parent_flow_run_id), "child").write_text(str(flow_run.id))
    hold()


@flow(**CLEANUP)
def parent() -> None:
    child()


@flow(retries=1, **CLEANUP)
def retried() -> None:
    with gpu_box("row", gpus="cpu", max_duration="15m") as box:
        mark(f"attempt-{flow_run.run_count}")
        mark_of(str(flow_run.id), f"box-{flow_run.run_count}").write_text(box.boxes[0].box.id)
        raise RuntimeError("a bug")


FLOWS = {
    each.__name__.replace("_", "-"): each
    for each in (trains, trains_async, submits, times_out, parent, retried)
}


def deploy() -> None:
    for name, each in FLOWS.items():
        each.from_source(
            source=str(PROJECT), entrypoint=f"tests/prefect/row_flows.py:{each.__name__}"
        ).deploy(name, work_pool_name="rows", print_next_steps=False, build=False, push=False)


if __name__ == "__main__":
    if sys.argv[1] == "deploy":
        deploy()
    else:
        trains.serve("served", pause_on_shutdown=False)
