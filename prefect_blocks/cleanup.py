"""State hooks: whatever ended a flow run, its boxes go.

A hook is the last of several layers, and one that Prefect does not always run: see ``docs/prefect.md``.
"""

from __future__ import annotations

from typing import Any

from gpu_flows.errors import GpuFlowsError
from gpu_flows.progress import Progress
from gpu_flows.runs.steps import teardown_box
from prefect_blocks.accounts import open_installation
from prefect_blocks.ledger import leases_of
from prefect_blocks.telling import Courier


def give_back(_flow: Any, flow_run: Any, state: Any) -> None:
    """End every box of a flow run; a hook for ``on_cancellation``, ``on_crashed`` and ``on_failure``.

    Args:
        flow_run: Whose boxes; its labels say which leases there are, and on which accounts.
        state: What it came to.

    Raises:
        ExceptionGroup: When not everything is proven to be gone, after everything has been tried.
    """
    from prefect.logging.loggers import flow_run_logger

    failures: list[GpuFlowsError] = []
    with Courier(flow_run_logger(flow_run)) as courier:
        for entry in leases_of(flow_run):
            try:
                with open_installation(entry.clouds, listener=courier.listen) as here:
                    teardown_box(
                        entry.owner, installation=here, clouds=entry.clouds, namespace=entry.namespace
                    )
            except GpuFlowsError as error:
                courier.listen(Progress("teardown", "teardown.failed", str(error)))
                failures.append(error)
    if failures:
        raise ExceptionGroup(f"boxes of a flow run that is {state.name} may go on billing", failures)


CLEANUP: dict[str, Any] = {
    "on_cancellation": [give_back],
    "on_crashed": [give_back],
    "on_failure": [give_back],
}
"""The hooks of a flow that rents: ``@flow(**CLEANUP)``."""

__all__ = ("CLEANUP", "give_back")
