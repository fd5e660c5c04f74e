"""Boxes for the length of a ``with`` block in a flow, and one training on them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_flows.errors import BadRequest
from gpu_flows.gpus.request import GpuRequest
from gpu_flows.leases.cost import cost_so_far
from gpu_flows.leases.lease import Lease, LeasedBox, Owner
from gpu_flows.leases.provision import ProvisionError
from gpu_flows.leases.teardown import TeardownFailed
from gpu_flows.progress import Progress
from gpu_flows.runs.handle import asked_for
from gpu_flows.runs.installation import Installation
from gpu_flows.runs.outcome import Outcome
from gpu_flows.runs.rental import Rental, rental
from gpu_flows.runs.steps import held, provision_box
from gpu_flows.runs.steps import launch_ddp as launch
from prefect_blocks.accounts import Account, find_secret, open_installation, refs_of
from prefect_blocks.ledger import Entry, enter, owner_in_flow
from prefect_blocks.reports import offers_table, scope_markdown
from prefect_blocks.telling import Courier, artifact_key

if TYPE_CHECKING:
    from gpu_flows.runs.report import RunReport
    from gpu_flows.training.spec import TrainingSpec


class GpuBox:
    """The boxes of a lease, as they go from task to task; pickled and as JSON it holds no secret.

    Args:
        lease: The lease with its boxes.
        request: What was asked for.
        max_duration: Of a job, from its start.
        max_cost: Dollars for the whole lease.
        installation: Whose clouds and keys; opened by the names in the lease when it is missing.
        courier: Of the scope that holds the boxes.
    """

    def __init__(
        self,
        lease: Lease,
        request: GpuRequest,
        *,
        max_duration: timedelta,
        max_cost: float | None = None,
        installation: Installation | None = None,
        courier: Courier | None = None,
    ) -> None:
        self.lease = lease
        self.request = request
        self.max_duration = max_duration
        self.max_cost = max_cost
        self.jobs: list[RunReport] = []
        self._installation = installation
        self._courier = courier

    @property
    def boxes(self) -> Sequence[LeasedBox]:
        """The boxes, by node."""
        return self.lease.boxes

    @property
    def owner(self) -> Owner:
        """Who answers for them."""
        return self.lease.owner

    @property
    def usd_per_hour(self) -> float:
        """Dollars per hour for all of them, as billed."""
        return self.lease.usd_per_hour

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return {
            "lease": self.lease.to_json(),
            "request": self.request.to_json(),
            "max_duration_s": self.max_duration.total_seconds(),
            "max_cost": self.max_cost,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GpuBox:
        """Rebuild it from what `to_json` returned."""
        return cls(
            Lease.from_json(data["lease"]),
            GpuRequest.from_json(data["request"]),
            max_duration=timedelta(seconds=data["max_duration_s"]),
            max_cost=data["max_cost"],
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_json, (self.to_json(),)

    def __repr__(self) -> str:
        return f"<{len(self.boxes)} boxes of {self.owner}>"

    @contextmanager
    def installation(self) -> Iterator[Installation]:
        """Lend the installation of the scope, or one of its own."""
        if self._installation is not None:
            yield self._installation
            return
        with open_installation(self.lease.clouds) as fresh:
            yield fresh

    def run(
        self, spec: TrainingSpec, courier: Courier, *, key: str, heartbeat_timeout_s: float | None
    ) -> RunReport:
        """Run a training on the boxes; one that failed is a report, too.

        Args:
            spec: What to run.
            courier: Told what happens, and what the job writes.
            key: Tells two jobs apart that have the same entrypoint and arguments.
            heartbeat_timeout_s: How long the boxes live on without hearing from us.
        """
        from gpu_flows.runs.run import Following, launch_options
        from gpu_flows.training.sources import check_sources

        check_sources(spec)
        secrets = spec.resolve_secrets(find_secret)
        with self.installation() as here:
            outcome = Outcome(self.owner, self.lease.namespace, str(self.request), here)
            outcome.lease, outcome.detached = self.lease, True
            following = Following(key=key, heartbeat_timeout_s=heartbeat_timeout_s, show_line=courier.show)
            options = launch_options(
                self.lease, following, installation=here, secrets=secrets, max_cost=self.max_cost
            )
            gpus, cpus = asked_for(self.request, self.boxes[0].offer)
            outcome.result = launch(
                self.lease,
                spec,
                nproc=spec.processes(gpus=gpus, cpus=cpus),
                installation=here,
                options=replace(options, listener=partial(self._tell, courier)),
            )
            outcome.seconds.update(outcome.result.seconds)
            report = outcome.finish()
        self.jobs.append(report)
        return report

    def _tell(self, courier: Courier, progress: Progress) -> None:
        courier.listen(progress)
        if self._courier is not None and self._courier is not courier:
            # The scope's bar moves; its log need not say everything twice.
            self._courier.listen(replace(progress, message=""))


@contextmanager
def gpu_box(
    name: str,
    gpus: Any,
    *,
    key: str = "0",
    clouds: Sequence[Account] | Account | None = None,
    limit: str | None = None,
    **parameters: Any,
) -> Iterator[GpuBox]:
    """Rent boxes for the length of a ``with`` block in a flow or a task, and give them back whatever happens.

    Args:
        name: Names the lease within the flow run; a retry of the run finds the boxes by it.
        gpus: A request such as ``"H100:8"``, or a list of them in order of preference.
        key: Tells scopes of the same name in one run apart.
        clouds: Where to rent, in order: names (``runpod``, or ``runpod@prod`` for the block ``prod``) and
            blocks of credentials.
        limit: A global concurrency limit of Prefect that the boxes take slots of, one each.
        **parameters: See `gpu_flows.runs.rental.rental`.

    Yields:
        The boxes, ready and checked.

    Raises:
        BadRequest: When something is wrong with what was asked; nothing was rented.
        ProvisionError: When no offer led to the boxes.
        TeardownFailed: When it cannot be proven at the end that all is gone.
    """
    from prefect.logging import get_run_logger

    owner = owner_in_flow(name, key)
    with ExitStack() as stack:
        stack.enter_context(_alone(owner))
        courier = stack.enter_context(
            Courier(get_run_logger(), progress_key=artifact_key(name, key, "progress"))
        )
        here = stack.enter_context(open_installation(clouds, listener=courier.listen))
        wanted = rental(gpus, settings=here.settings, clouds=refs_of(clouds), **parameters)
        namespace = here.namespace(wanted.clouds)
        write_down(Entry(owner, namespace, wanted.clouds), courier)
        if limit is not None:
            stack.enter_context(_slots(limit, wanted.nodes))
        yield from _held(owner, wanted, here, courier, artifact_key(name, key))


def _held(
    owner: Owner, wanted: Rental, here: Installation, courier: Courier, artifact: str
) -> Iterator[GpuBox]:
    """Hold the boxes, and show what became of them."""
    namespace = here.namespace(wanted.clouds)
    outcome = Outcome(owner, namespace, str(wanted.request), here)
    lease = Lease(owner=owner, namespace=namespace, clouds=wanted.clouds, nodes=wanted.nodes)
    box: GpuBox | None = None
    left: list[str] = []
    try:
        with outcome.listening(), held(owner, wanted, installation=here) as (lease, _):
            lease = provisioned(lease, wanted, here, courier, artifact)
            box = GpuBox(
                lease,
                wanted.request,
                max_duration=wanted.max_duration,
                max_cost=wanted.max_cost,
                installation=here,
                courier=courier,
            )
            yield box
    except TeardownFailed as error:
        left = list(error.failures)
        courier.listen(Progress("teardown", "teardown.failed", str(error), {"lease": lease.id}))
        raise
    finally:
        journal = here.journal(owner, namespace)
        cost = cost_so_far(journal, here.clock.now())
        # Where the block failed and its teardown, too, the first error is the one that is raised.
        left = left or [f"{ref} box {each.id} is not proven gone" for ref, each in journal.live_boxes()]
        if box is not None:
            # What a training reported while its boxes still ran was not the whole bill.
            box.jobs = [
                replace(job, cost=cost, ended=outcome.ended, left=left, detached=False) for job in box.jobs
            ]
            courier.do("the last report", partial(_keep, box.jobs))
        text = scope_markdown(
            lease,
            str(wanted.request),
            jobs=box.jobs if box else (),
            ended=outcome.ended,
            cost=cost,
            left=left,
        )
        courier.do("the report", partial(_markdown, f"{artifact}-report", text, str(cost)))


def _keep(jobs: Sequence[RunReport]) -> None:
    """Write the last report of a lease beside its logs."""
    for job in jobs:
        text = json.dumps(job.to_json(), indent=2)
        (Path(job.folder) / "report.json").write_text(text, encoding="utf-8")


def provisioned(lease: Lease, wanted: Rental, here: Installation, courier: Courier, artifact: str) -> Lease:
    """Provision, and show the offers that were walked, also when none led there."""
    try:
        filled, attempts = provision_box(lease, wanted, installation=here)
    except ProvisionError as error:
        courier.do("the offers", partial(_table, f"{artifact}-offers", offers_table(error.attempts)))
        raise
    courier.do("the offers", partial(_table, f"{artifact}-offers", offers_table(attempts)))
    return filled


def write_down(entry: Entry, courier: Courier) -> None:
    """Write the lease on the flow run; without it the hooks are blind, and the other layers have to do."""
    try:
        enter(entry)
    except Exception as error:  # noqa: BLE001 - said; the watchdog, the dead-man and the reaper do without
        message = f"the flow run could not be labelled, so its hooks will not find the boxes: {error}"
        courier.listen(Progress("reserve", "label.unwritable", message))


@contextmanager
def _slots(limit: str, count: int) -> Iterator[None]:
    from prefect.concurrency.sync import concurrency

    # A training of hours must not die because the server was away for a minute.
    with concurrency(limit, occupy=count, strict=False, raise_on_lease_renewal_failure=False):
        yield


_HELD: set[Owner] = set()
_LOCK = threading.Lock()


@contextmanager
def _alone(owner: Owner) -> Iterator[None]:
    """Refuse a second scope of the same name at the same time: the two would share their boxes."""
    with _LOCK:
        if owner in _HELD:
            raise BadRequest(
                f"{owner} holds boxes already in this run", hint="give one of the two another name or key"
            )
        _HELD.add(owner)
    try:
        yield
    finally:
        with _LOCK:
            _HELD.discard(owner)


def _table(key: str, rows: list[dict[str, Any]]) -> None:
    from prefect.artifacts import create_table_artifact

    # In the context of an async flow it would return a coroutine that nobody awaits.
    create: Any = create_table_artifact
    create(rows, key=key, description="The offers that were walked, in this order.", _sync=True)


def _markdown(key: str, text: str, cost: str) -> None:
    from prefect.artifacts import create_markdown_artifact

    create: Any = create_markdown_artifact
    create(text, key=key, description=f"What was rented, ran and cost: {cost}", _sync=True)


__all__ = ("GpuBox", "gpu_box", "provisioned", "write_down")
