"""The whole of it in one call: resolve, provision, launch, tear down, and a report that proves the end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_flows.errors import BadRequest, GpuFlowsError
from gpu_flows.leases.cost import cost_so_far
from gpu_flows.leases.lease import BoxName, Lease, Owner, deadline_of, lease_id
from gpu_flows.leases.provision import ProvisionError
from gpu_flows.leases.teardown import TeardownFailed
from gpu_flows.progress import Listener, Progress, counted, ignore
from gpu_flows.runs.handle import asked_for
from gpu_flows.runs.heartbeat import DeadmanHeartbeat
from gpu_flows.runs.installation import Installation
from gpu_flows.runs.outcome import Outcome
from gpu_flows.runs.rental import Rental, rental
from gpu_flows.runs.report import RunReport
from gpu_flows.runs.resolve import Resolution, resolve
from gpu_flows.runs.steps import held, launch_ddp, owner_of, provision_box, teardown_box

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gpu_flows.training.launch import LaunchOptions
    from gpu_flows.training.logbook import ShowLine
    from gpu_flows.training.spec import TrainingSpec

SecretLookup = Callable[[str], str | None]

_OFFERS_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What a run would do, found out without spending anything.

    Attributes:
        resolution: The offers, in the order in which they would be tried.
        create: What the create call of the first offer would carry, by node.
        commands: The command line of each node.
        files: What would be uploaded.
    """

    resolution: Resolution
    create: Sequence[Mapping[str, Any]]
    commands: Sequence[str]
    files: str

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values; it holds no secret."""
        return {
            "resolution": self.resolution.to_json(),
            "create": [dict(body) for body in self.create],
            "commands": list(self.commands),
            "files": self.files,
        }

    def __rich__(self) -> RenderableType:
        """Return it as tables for a terminal."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        facts = Table.grid(padding=(0, 2))
        facts.add_column(style="dim", no_wrap=True)
        facts.add_column(overflow="fold")
        facts.add_row("offers", Text(f"{len(self.resolution.available)}, in this order:"))
        for offer in self.resolution.available[:_OFFERS_SHOWN]:
            where = " ".join(filter(None, (offer.cloud, offer.zone or offer.region, offer.instance_type)))
            facts.add_row("", Text(f"{where}, {offer.usd_per_hour:.2f} dollars per hour"))
        if (more := len(self.resolution.available) - _OFFERS_SHOWN) > 0:
            facts.add_row("", Text(f"and {more} more"))
        for node, body in enumerate(self.create):
            rows = [f"{key}: {value}" for key, value in body.items() if value is not None]
            facts.add_row(f"create {node}", Text("\n".join(rows)))
        facts.add_row("upload", Text(self.files))
        for node, line in enumerate(self.commands):
            facts.add_row(f"node {node}", Text(line))
        return Group(Text("nothing was rented; this is what a run would do", "bold"), facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """How a run is followed.

    Attributes:
        key: Tells two jobs of one lease apart that have the same entrypoint and arguments.
        heartbeat_timeout_s: How long the boxes live on without hearing from us; None for their deadline alone.
        detach: Return as soon as the job runs, and leave the boxes to their deadline.
        max_preemptions: How often the run goes on elsewhere after a box was taken away; a failure of the training
            is none.
        show_line: Shown what the job writes: where from, and the line.
        upload_progress: Told the bytes sent and the bytes in all.
        find_secret: Returns the value behind a secret's source.
    """

    key: str = ""
    heartbeat_timeout_s: float | None = 1800
    detach: bool = False
    max_preemptions: int = 3
    show_line: ShowLine | None = None
    upload_progress: Callable[[int, int], None] | None = None
    find_secret: SecretLookup = field(default_factory=lambda: os.environ.get)


def run(
    entrypoint: str | Path | None = None,
    *,
    gpus: Any,
    spec: TrainingSpec | None = None,
    name: str | Sequence[str] | Owner | None = None,
    installation: Installation | None = None,
    following: Following | None = None,
    listener: Listener = ignore,
    **parameters: Any,
) -> RunReport:
    """Rent boxes, train on them, fetch the outputs, and give the boxes back, whatever happens.

    Args:
        entrypoint: What to run; see `TrainingSpec.entrypoint`. Not together with ``spec``.
        gpus: A request such as ``"H100:8"``, a list of them in order of preference, or ``"cpu:2"``.
        spec: What to run, as a whole.
        name: Names the lease, so that anyone can find its boxes; a call with the name of a detached run finds its
            boxes and follows its job.
        installation: Whose clouds; the default one of this machine unless given.
        following: How the job is followed.
        listener: Told what happens.
        **parameters: Fields of `TrainingSpec`, and the parameters of `gpu_flows.runs.rental.rental`.

    Returns:
        The report. A training that failed, and boxes that could not be had, are reports too.

    Raises:
        BadRequest: When something is wrong with what was asked; nothing was rented.
    """
    here = installation or Installation(listener=listener)
    try:
        job, wanted = _understand(entrypoint, gpus, spec, here, parameters)
        return _Run(job, wanted, _owner(name), here, following or Following()).run()
    finally:
        if installation is None:
            here.close()


def dry_run(
    entrypoint: str | Path | None = None,
    *,
    gpus: Any,
    spec: TrainingSpec | None = None,
    name: str | Sequence[str] | Owner | None = None,
    installation: Installation | None = None,
    **parameters: Any,
) -> DryRun:
    """Show what `run` would do: the offers, the create bodies and the command lines; spends nothing.

    Args:
        entrypoint: As for `run`.
        gpus: As for `run`.
        spec: As for `run`.
        name: As for `run`.
        installation: As for `run`.
        **parameters: As for `run`.

    Raises:
        BadRequest: When something is wrong with what was asked.
    """
    from gpu_flows.training.commands import node_command
    from gpu_flows.training.sources import check_sources

    here = installation or Installation()
    try:
        job, wanted = _understand(entrypoint, gpus, spec, here, parameters)
        sources = check_sources(job)
        found = resolve(wanted, here)
        first = found.available[0] if found.available else None
        nproc = _nproc(job, wanted, first)
        several = wanted.nodes > 1
        commands = [
            node_command(
                job,
                node=node,
                nodes=wanted.nodes,
                nproc=nproc,
                master_addr="<address of node 0>" if several else None,
                master_port=0 if several else None,
                code_dir="gpu-flows/<job>",
            ).summary
            for node in range(wanted.nodes)
        ]
        return DryRun(
            resolution=found,
            create=_create_bodies(first, wanted, _owner(name), here) if first else (),
            commands=commands,
            files=str(sources.path),
        )
    finally:
        if installation is None:
            here.close()


class _Run:
    """One run on its way to its report."""

    def __init__(
        self, job: TrainingSpec, wanted: Rental, owner: Owner, here: Installation, following: Following
    ) -> None:
        self._job, self._wanted, self._owner = job, wanted, owner
        self._here, self._following = here, following

    def run(self) -> RunReport:
        from gpu_flows.training.sources import check_sources

        # All that can be wrong with the request is found out before anything is rented.
        check_sources(self._job)
        secrets = self._job.resolve_secrets(self._following.find_secret)
        namespace = self._here.namespace(self._wanted.clouds)
        outcome = Outcome(self._owner, namespace, str(self._wanted.request), self._here)
        with outcome.phase("resolve"):
            found = resolve(self._wanted, self._here)
        offers = f"{counted(len(found.available), 'offer')} for {self._wanted.request}"
        self._here.listener(Progress("resolve", "offers.found", offers))
        detach = self._following.detach
        try:
            with (
                outcome.listening(),
                held(self._owner, self._wanted, installation=self._here, detach=detach) as (lease, _),
            ):
                self._work(outcome, lease, found, secrets)
                outcome.detached = detach and outcome.failure is None
                teardown_began = time.monotonic()
                if detach and outcome.failure is not None:
                    # There is no job for whose sake the boxes should be left.
                    teardown_box(lease, installation=self._here, sole_creator=True)
            outcome.seconds["teardown"] = time.monotonic() - teardown_began
        except TeardownFailed as error:
            outcome.left = list(error.failures)
        return outcome.finish()

    def _work(self, outcome: Outcome, lease: Lease, found: Resolution, secrets: Mapping[str, str]) -> None:
        """Provision and launch, again after a preemption; a failure ends the work and is kept for the report."""
        resolution: Resolution | None = found
        try:
            while not self._attempt(outcome, lease, resolution, secrets):
                outcome.preemptions += 1
                lost = (
                    outcome.result.diagnosis.sentence if outcome.result and outcome.result.diagnosis else ""
                )
                going_on = (
                    f"{lost}: going on elsewhere, {outcome.preemptions} of {self._following.max_preemptions}"
                )
                self._here.listener(Progress("launch", "job.preempted", going_on))
                # An interrupted box may go on billing for its storage, and what is left of a gang for all of it.
                teardown_box(lease, installation=self._here, sole_creator=True)
                resolution = None
        except ProvisionError as error:
            outcome.attempts, outcome.failure = [*outcome.attempts, *error.attempts], error
        except (BadRequest, TeardownFailed):
            raise
        except GpuFlowsError as error:
            outcome.failure = error

    def _attempt(
        self, outcome: Outcome, lease: Lease, resolution: Resolution | None, secrets: Mapping[str, str]
    ) -> bool:
        """Provision and launch once; tell whether the run is over."""
        with outcome.phase("provision"):
            outcome.lease, attempts = provision_box(
                lease, self._wanted, installation=self._here, resolution=resolution
            )
        outcome.attempts = [*outcome.attempts, *attempts]
        outcome.result = launch_ddp(
            outcome.lease,
            self._job,
            nproc=_nproc(self._job, self._wanted, outcome.lease.boxes[0].offer),
            installation=self._here,
            options=launch_options(
                outcome.lease,
                self._following,
                installation=self._here,
                secrets=secrets,
                max_cost=self._wanted.max_cost,
            ),
        )
        outcome.took(outcome.result.seconds)
        diagnosis = outcome.result.diagnosis
        preempted = diagnosis is not None and diagnosis.cause.value == "preempted"
        return not preempted or outcome.preemptions >= self._following.max_preemptions


def launch_options(
    lease: Lease,
    following: Following,
    *,
    installation: Installation,
    secrets: Mapping[str, str],
    max_cost: float | None = None,
) -> LaunchOptions:
    """Return how a job on the boxes of a lease is run and followed.

    Args:
        lease: The lease with its boxes.
        following: How it is followed.
        installation: Whose folders and listener.
        secrets: Values of the spec's secrets, by name.
        max_cost: Dollars for all boxes of the lease, from their beginning.
    """
    from gpu_flows.training.launch import LaunchOptions
    from gpu_flows.training.logbook import show_nothing

    return LaunchOptions(
        folder=installation.run_folder(lease.id),
        key=following.key,
        secrets=secrets,
        heartbeat=DeadmanHeartbeat(),
        heartbeat_timeout_s=following.heartbeat_timeout_s,
        detach=following.detach,
        budget_s=_budget_s(lease, max_cost, installation),
        show_line=following.show_line or show_nothing,
        upload_progress=following.upload_progress,
        listener=installation.listener,
    )


def _budget_s(lease: Lease, max_cost: float | None, here: Installation) -> float | None:
    """Return the seconds that the rest of the money buys."""
    if max_cost is None or not lease.usd_per_hour:
        return None
    left_usd = max_cost - cost_so_far(here.journal(lease.owner, lease.namespace), here.clock.now()).usd
    return max(0.0, left_usd / lease.usd_per_hour * 3600)


def _understand(
    entrypoint: str | Path | None,
    gpus: Any,
    spec: TrainingSpec | None,
    here: Installation,
    parameters: Mapping[str, Any],
) -> tuple[TrainingSpec, Rental]:
    """Split the parameters between the spec and the rental; what both name goes to both."""
    from gpu_flows.training.spec import TrainingSpec

    known = set(TrainingSpec.model_fields)
    if spec is None:
        if entrypoint is None:
            raise BadRequest("nothing to run", hint='give an entrypoint such as "train.py", or spec=')
        fields = {key: value for key, value in parameters.items() if key in known}
        job = TrainingSpec(entrypoint=str(entrypoint), **fields)
    else:
        if entrypoint is not None or (both := sorted(known & set(parameters) - _SHARED)):
            extra = "entrypoint" if entrypoint is not None else both[0]
            raise BadRequest(f"give {extra} in the spec, or no spec")
        job = spec.model_copy(update={key: parameters[key] for key in _SHARED & set(parameters)})
    renting = {key: value for key, value in parameters.items() if key not in known}
    wrong = sorted(set(renting) - _RENTAL_PARAMETERS)
    if wrong:
        import difflib

        close = difflib.get_close_matches(wrong[0], [*known, *_RENTAL_PARAMETERS], n=1)
        raise BadRequest(
            f"there is no parameter {wrong[0]!r}", hint=f"did you mean {close[0]}?" if close else None
        )
    image = {"": job.image} if isinstance(job.image, str) else dict(job.image or {})
    wanted = rental(
        gpus,
        settings=here.settings,
        nodes=job.nodes,
        image=image,
        max_duration=job.max_duration,
        **renting,
    )
    return job, wanted


_SHARED = {"nodes", "image", "max_duration"}
_RENTAL_PARAMETERS = set(rental.__kwdefaults__ or {}) - {"settings"} | {"gpus"}


def _owner(name: str | Sequence[str] | Owner | None) -> Owner:
    if name is not None:
        return owner_of(name)
    import uuid

    return Owner(("cli", uuid.uuid4().hex[:12]))


def _nproc(job: TrainingSpec, wanted: Rental, offer: Any) -> int:
    """Return the processes of each node: one per GPU that was asked for, or the N of ``cpu:N``."""
    gpus, cpus = asked_for(wanted.request, offer)
    return job.processes(gpus=gpus, cpus=cpus)


def _create_bodies(offer: Any, wanted: Rental, owner: Owner, here: Installation) -> list[dict[str, Any]]:
    """Return what the create calls would carry; the nonce is drawn when they are sent."""
    ref = offer.ref
    cloud = here.cloud(ref)
    namespace = here.namespace(wanted.clouds)
    now = here.clock.now().replace(microsecond=0)
    ready_s = wanted.ready_timeout_s or cloud.capabilities.ready_timeout_s
    deadline = deadline_of(now, ready_timeout_s=ready_s, max_duration=wanted.max_duration)
    names = [
        BoxName(
            namespace=namespace,
            lease=lease_id(owner, namespace),
            node=node,
            created=now,
            nonce="a" * 8,
            deadline=deadline.replace(microsecond=0),
        )
        for node in range(wanted.nodes)
    ]
    return [
        {
            "cloud": ref,
            "region": offer.zone or offer.region,
            "instance_type": offer.instance_type,
            "usd_per_hour": offer.usd_per_hour,
            "name": str(name),
            "owner": str(owner),
            "image": wanted.image.get(cloud.name, wanted.image.get("")),
            "disk_gb": wanted.disk_gb,
            "deadline": deadline.isoformat(),
            "ssh_public_key": here.identity(cloud, namespace).public_key,
        }
        for name in names
    ]
