"""The whole of it in one call: resolve, provision, launch, tear down, and a report that proves the end."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_flows.errors import BadRequest, GpuFlowsError
from gpu_flows.leases.cost import cost_so_far
from gpu_flows.leases.ending import EndedBox
from gpu_flows.leases.lease import BoxName, Lease, Owner, deadline_of, lease_id
from gpu_flows.leases.provision import Attempt, ProvisionError
from gpu_flows.leases.teardown import TeardownFailed
from gpu_flows.progress import Listener, Progress, ignore
from gpu_flows.runs.heartbeat import DeadmanHeartbeat
from gpu_flows.runs.installation import Installation
from gpu_flows.runs.rental import Rental, rental
from gpu_flows.runs.report import NodeReport, RunReport
from gpu_flows.runs.resolve import Resolution, resolve
from gpu_flows.runs.steps import held, launch_ddp, owner_of, provision_box

if TYPE_CHECKING:
    from gpu_flows.training.launch import JobResult, LaunchOptions
    from gpu_flows.training.logbook import ShowLine
    from gpu_flows.training.spec import TrainingSpec

SecretLookup = Callable[[str], str | None]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """How a run is followed.

    Attributes:
        key: Tells two jobs of one lease apart that have the same entrypoint and arguments.
        heartbeat_timeout_s: How long the boxes live on without hearing from us; None for their deadline alone.
        detach: Return as soon as the job runs, and leave the boxes to their deadline.
        show_line: Shown what the job writes: where from, and the line.
        upload_progress: Told the bytes sent and the bytes in all.
        find_secret: Returns the value behind a secret's source.
    """

    key: str = ""
    heartbeat_timeout_s: float | None = 1800
    detach: bool = False
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
        name: Names the lease: a call with the name of a run that was cut off finds its boxes and its job.
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
        self._seconds: dict[str, float] = {}
        self._attempts: list[Attempt] = []
        self._lease: Lease | None = None
        self._result: JobResult | None = None
        self._failure: GpuFlowsError | None = None
        self._left: list[str] = []
        self._ended: list[EndedBox] = []

    def run(self) -> RunReport:
        from gpu_flows.training.sources import check_sources

        # All that can be wrong with the request is found out before anything is rented.
        check_sources(self._job)
        secrets = self._job.resolve_secrets(self._following.find_secret)
        namespace = self._here.namespace(self._wanted.clouds)
        started_at = self._here.clock.now()
        with self._phase("resolve"):
            found = resolve(self._wanted, self._here)
        self._tell("resolve", "offers.found", f"{len(found.available)} offers for {self._wanted.request}")
        listen, self._here.listener = self._here.listener, self._listening(self._here.listener)
        try:
            with held(self._owner, self._wanted, installation=self._here, detach=self._following.detach) as (
                lease,
                _,
            ):
                self._work(lease, found, secrets)
                teardown_began = time.monotonic()
            self._seconds["teardown"] = time.monotonic() - teardown_began
        except TeardownFailed as error:
            self._left = list(error.failures)
        finally:
            self._here.listener = listen
        report = self._report(namespace, started_at)
        folder = Path(report.folder)
        (folder / "report.json").write_text(json.dumps(report.to_json(), indent=2))
        return report

    def _work(self, lease: Lease, found: Resolution, secrets: Mapping[str, str]) -> None:
        """Provision and launch; a failure ends the work and is kept for the report."""
        try:
            with self._phase("provision"):
                self._lease, self._attempts = provision_box(
                    lease, self._wanted, installation=self._here, resolution=found
                )
            self._result = launch_ddp(
                self._lease,
                self._job,
                nproc=_nproc(self._job, self._wanted, self._lease.boxes[0].offer),
                installation=self._here,
                options=self._options(self._lease, secrets),
            )
            self._seconds.update(self._result.seconds)
        except ProvisionError as error:
            self._attempts, self._failure = list(error.attempts), error
        except BadRequest:
            raise
        except GpuFlowsError as error:
            self._failure = error

    def _options(self, lease: Lease, secrets: Mapping[str, str]) -> LaunchOptions:
        from gpu_flows.training.launch import LaunchOptions
        from gpu_flows.training.logbook import show_nothing

        return LaunchOptions(
            folder=self._here.run_folder(lease.id),
            key=self._following.key,
            secrets=secrets,
            heartbeat=DeadmanHeartbeat(),
            heartbeat_timeout_s=self._following.heartbeat_timeout_s,
            detach=self._following.detach,
            budget_s=self._budget_s(lease),
            show_line=self._following.show_line or show_nothing,
            upload_progress=self._following.upload_progress,
            listener=self._here.listener,
        )

    def _budget_s(self, lease: Lease) -> float | None:
        """Return the seconds that the rest of the money buys."""
        if self._wanted.max_cost is None or not lease.usd_per_hour:
            return None
        journal = self._here.journal(lease.owner, lease.namespace)
        left_usd = self._wanted.max_cost - cost_so_far(journal, self._here.clock.now()).usd
        return max(0.0, left_usd / lease.usd_per_hour * 3600)

    def _report(self, namespace: str, started_at: datetime) -> RunReport:
        lease = lease_id(self._owner, namespace)
        journal = self._here.journal(self._owner, namespace)
        diagnosis = self._result.diagnosis if self._result else None
        if self._failure is not None:
            cause, sentence = self._failure.code, str(self._failure)
        elif diagnosis is None:
            cause, sentence = "running", "the job runs on, detached"
        else:
            cause, sentence = diagnosis.cause.value, diagnosis.sentence
        fetched = self._result.fetched if self._result else None
        return RunReport(
            owner=self._owner,
            lease=lease,
            namespace=namespace,
            request=str(self._wanted.request),
            cause=cause,
            sentence=sentence,
            exit_code=diagnosis.exit_code if diagnosis else None,
            traceback=diagnosis.traceback if diagnosis else "",
            attempts=self._attempts,
            boxes=self._lease,
            usd_per_hour=self._lease.usd_per_hour if self._lease else 0.0,
            started_at=started_at,
            seconds=self._seconds,
            nodes=self._nodes(),
            outputs=[str(path) for path in fetched.files] if fetched else (),
            not_fetched=_not_fetched(fetched),
            folder=str(self._here.run_folder(lease)),
            cost=cost_so_far(journal, self._here.clock.now()),
            ended=self._ended,
            left=self._left,
            detached=self._following.detach,
        )

    def _nodes(self) -> list[NodeReport]:
        if self._result is None or self._lease is None:
            return []
        boxes = {leased.node: leased.box for leased in self._lease.boxes}
        return [
            NodeReport(
                node=evidence.node,
                box=f"{boxes[evidence.node].cloud} {boxes[evidence.node].id}",
                cause=evidence.outcome,
                exit_code=evidence.exit_code,
                ranks={rank.rank: rank.exit_code for rank in evidence.ranks},
            )
            for evidence in self._result.nodes
        ]

    def _listening(self, listener: Listener) -> Listener:
        """Collect the boxes that end on the way, and pass everything on."""

        def listen(progress: Progress) -> None:
            if progress.kind == "box.gone":
                self._ended.append(EndedBox.from_json(progress.data))
            listener(progress)

        return listen

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = time.monotonic() - began

    def _tell(self, step: str, kind: str, message: str) -> None:
        self._here.listener(Progress(step, kind, message))


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
    if offer is not None and offer.gpu is not None:
        return job.processes(gpus=offer.used_count or offer.gpu_count)
    alternatives = wanted.request.alternatives
    index = offer.alternative if offer is not None else 0
    asked = alternatives[min(index, len(alternatives) - 1)]
    return job.processes(gpus=0 if asked.is_cpu else asked.count, cpus=asked.count if asked.is_cpu else 0)


def _create_bodies(offer: Any, wanted: Rental, owner: Owner, here: Installation) -> list[dict[str, Any]]:
    """Return what the create calls would carry; the nonce is drawn when they are sent."""
    ref = offer.cloud if offer.account == "default" else f"{offer.cloud}@{offer.account}"
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


def _not_fetched(fetched: Any) -> list[str]:
    if fetched is None:
        return []
    return [
        *(f"{pattern}: matches nothing" for pattern in fetched.unmatched),
        *(f"{path}: outside of the working directory and the home" for path in fetched.outside),
    ]
