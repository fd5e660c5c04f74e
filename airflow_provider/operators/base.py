"""What the operators have in common: how they end, and the parameters of renting."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator

if TYPE_CHECKING:
    from airflow.sdk import Context

    from gpu_flows.leases.lease import Owner
    from gpu_flows.runs.installation import Installation
    from gpu_flows.runs.rental import Rental
    from gpu_flows.settings import Settings

_ORPHAN_POLL_S = 2.0


class TaskKilled(BaseException):
    """Airflow wants this task to end now; it is raised wherever the task stands.

    It is no `Exception`, so that nothing on the way takes it for a failure that it can live with.
    """


class GpuFlowsOperator(BaseOperator):
    """A task that works with rented boxes.

    Airflow gives a task that is killed about five seconds, and raises nothing in it: ``on_kill`` raises
    here, so that scopes end and their boxes go. A task whose supervisor has died is never told at all: it
    notices, and ends itself, so that no second attempt works beside it.
    """

    ui_color = "#e8f4ea"

    def on_kill(self) -> None:
        """End the task where it stands; creating and destroying a box are finished first."""
        raise TaskKilled(f"{self.task_id} was killed")

    @contextmanager
    def installation(self) -> Iterator[Installation]:
        """Open gpu-flows for the length of a block, as this worker and its connections have it."""
        from airflow_provider.installation import open_installation

        _end_with_supervisor(self.log)
        with open_installation(self.log) as here:
            yield here

    def box_owner(self, box: Mapping[str, Any] | str, context: Context) -> Owner:
        """Return who answers for a box; see `airflow_provider.boxes.owner_of`."""
        from airflow_provider.boxes import owner_of

        return owner_of(box, context)


class RentingOperator(GpuFlowsOperator):
    """A task that may rent: the parameters are those of every other surface.

    Args:
        gpus: A request such as ``"H100:8"``, or a list of them in order of preference.
        clouds: Where to ask, in order; ``runpod@team_a`` takes the connection ``team_a``.
        regions: Regions to keep.
        min_vram_gb: Least nominal VRAM per GPU.
        disk_gb: Disk of each box.
        nodes: Number of boxes.
        image: One image, or a table by cloud.
        spot: ``never``, ``prefer`` or ``only``.
        price_cap: Dollars per hour for one whole box.
        max_cost: Dollars for the whole run.
        strategy: ``ordered`` or ``cheapest``.
        max_duration: Of the job: a timedelta, seconds, or text like ``6h``.
        ready_timeout_s: Per box until checked.
        wait_for_capacity: How long to go on asking, likewise.
        allow_unreaped: Rent also where a box cannot end its own billing.
    """

    RENTAL: ClassVar[tuple[str, ...]] = (
        "gpus",
        "clouds",
        "regions",
        "min_vram_gb",
        "disk_gb",
        "nodes",
        "image",
        "spot",
        "price_cap",
        "max_cost",
        "strategy",
        "max_duration",
        "ready_timeout_s",
        "wait_for_capacity",
        "allow_unreaped",
    )
    template_fields: Sequence[str] = RENTAL

    def __init__(
        self,
        *,
        gpus: Any,
        clouds: Sequence[str] | str | None = None,
        regions: Sequence[str] | str = (),
        min_vram_gb: float | str | None = None,
        disk_gb: int | str | None = None,
        nodes: int | str = 1,
        image: str | Mapping[str, str] | None = None,
        spot: str = "never",
        price_cap: float | str | None = None,
        max_cost: float | str | None = None,
        strategy: str = "ordered",
        max_duration: timedelta | float | str = timedelta(hours=24),
        ready_timeout_s: float | str | None = None,
        wait_for_capacity: timedelta | float | str = 0,
        allow_unreaped: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.gpus = gpus
        self.clouds = clouds
        self.regions = regions
        self.min_vram_gb = min_vram_gb
        self.disk_gb = disk_gb
        self.nodes = nodes
        self.image = image
        self.spot = spot
        self.price_cap = price_cap
        self.max_cost = max_cost
        self.strategy = strategy
        self.max_duration = max_duration
        self.ready_timeout_s = ready_timeout_s
        self.wait_for_capacity = wait_for_capacity
        self.allow_unreaped = allow_unreaped

    def rental_parameters(self) -> dict[str, Any]:
        """Return the parameters of renting; numbers that a template wrote as text are numbers again."""
        told = {name: getattr(self, name) for name in self.RENTAL}
        for name, kind in _NUMBERS.items():
            if isinstance(value := told[name], str):
                told[name] = kind(value) if value.strip() and value != "None" else None
        told["nodes"] = told["nodes"] or 1
        return told

    def rental(self, settings: Settings) -> Rental:
        """Return what is to be rented.

        Raises:
            BadRequest: Naming the parameter that is wrong.
        """
        from gpu_flows.runs.rental import rental

        return rental(settings=settings, **self.rental_parameters())


_NUMBERS: dict[str, Any] = {
    "min_vram_gb": float,
    "disk_gb": int,
    "nodes": int,
    "price_cap": float,
    "max_cost": float,
    "ready_timeout_s": float,
}


def _end_with_supervisor(log: Any) -> None:
    """End this process when the supervisor that started it has died.

    Airflow sends nothing to such an orphan, and starts the task's next attempt beside it.
    """
    from airflow.sdk.execution_time import task_runner
    from airflow.sdk.execution_time.comms import CommsDecoder

    # In `dag.test()` the task runs within the caller's own process, which has no supervisor.
    if not isinstance(getattr(task_runner, "SUPERVISOR_COMMS", None), CommsDecoder):
        return
    supervisor = os.getppid()

    def watch() -> None:
        while os.getppid() == supervisor:
            time.sleep(_ORPHAN_POLL_S)
        log.error("the supervisor of this task has died: ending")
        os._exit(1)

    threading.Thread(target=watch, name="gpu-flows-supervisor", daemon=True).start()
