"""The steps: resolve, reserve, provision, launch, tear down; the same parameters as on every other surface."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gpu_flows.errors import BadRequest
from gpu_flows.leases.journal import RESERVED, JournalUnwritable, this_process
from gpu_flows.leases.lease import Lease, Owner
from gpu_flows.leases.provision import Attempt, Provisioner, ProvisionError, Terms
from gpu_flows.leases.shield import shielded
from gpu_flows.leases.teardown import TeardownReport, teardown
from gpu_flows.leases.watchdog import Watchdog, start_watchdog
from gpu_flows.progress import Progress
from gpu_flows.runs.check import SshCheck
from gpu_flows.runs.handle import remember, remembered
from gpu_flows.runs.installation import Installation
from gpu_flows.runs.rental import Rental, rental
from gpu_flows.runs.resolve import Resolution, resolve

if TYPE_CHECKING:
    from gpu_flows.training.launch import JobResult, LaunchOptions
    from gpu_flows.training.spec import TrainingSpec

TEARDOWN_TIMEOUT_S = 600.0


def resolve_gpu(gpus: Any, *, installation: Installation | None = None, **parameters: Any) -> Resolution:
    """Ask the clouds what can be rented now, and rank it; spends nothing.

    Args:
        gpus: A request such as ``"H100:8"``, or a list of them in order of preference.
        installation: Whose clouds; the default one of this machine unless given.
        **parameters: See `gpu_flows.runs.rental.rental`.

    Returns:
        The offers in the order in which they are worth trying.

    Raises:
        BadRequest: When the request or a parameter is wrong.
    """
    with _installation(installation) as here:
        return resolve(rental(gpus, settings=here.settings, **parameters), here)


def owner_of(name: str | Sequence[str] | Owner) -> Owner:
    """Return the owner that a name, a list of parts, or an owner stands for."""
    if isinstance(name, Owner):
        return name
    return Owner.parse(name) if isinstance(name, str) else Owner(tuple(name))


def reserve(
    owner: str | Sequence[str] | Owner,
    wanted: Rental,
    *,
    installation: Installation,
    detached: bool = True,
) -> Lease:
    """Compute the lease of an owner, and remember where it may rent; asks no cloud anything.

    Args:
        owner: Who answers for the boxes.
        wanted: What is to be rented, and where.
        installation: Whose namespace and journals.
        detached: Whether the boxes may outlive this process; a scope says no, so that the reaper of this
            machine knows that they are orphaned when the process has died.
    """
    who = owner_of(owner)
    namespace = installation.namespace(wanted.clouds)
    lease = Lease(owner=who, namespace=namespace, clouds=wanted.clouds, nodes=wanted.nodes)
    try:
        installation.journal(who, namespace).record(
            RESERVED,
            clouds=list(wanted.clouds),
            owner=list(who.parts),
            holder=this_process(detached=detached),
        )
    except JournalUnwritable as error:
        installation.listener(Progress("reserve", "journal.unwritable", f"not written down: {error}"))
    return lease


def provision_box(
    lease: Lease, wanted: Rental, *, installation: Installation, resolution: Resolution | None = None
) -> tuple[Lease, list[Attempt]]:
    """Rent the boxes of a lease, failing over until every node is ready and checked.

    Repeating it finds the boxes of an earlier attempt of the same owner instead of renting more.

    Args:
        lease: From `reserve`.
        wanted: What is to be rented.
        installation: Whose clouds and keys.
        resolution: Offers that were asked for a moment ago, for the first round.

    Returns:
        The lease with its boxes, and every offer that was walked.

    Raises:
        ProvisionError: When no offer led there, with every attempt and its cause.
    """
    rounds = iter([resolution] if resolution is not None else [])
    seen: list[Resolution] = []

    def offers() -> Sequence[Any]:
        found = next(rounds, None) or resolve(wanted, installation)
        seen[:] = [found]
        for ref, reason in found.silent.items():
            installation.listener(Progress("resolve", "cloud.silent", f"{ref} gave no offers: {reason}"))
        return found.offers

    terms = Terms(
        query=wanted.query,
        offers=offers,
        price_cap=wanted.price_cap,
        max_duration=wanted.max_duration,
        ready_timeout_s=wanted.ready_timeout_s,
        wait_for_capacity=wanted.wait_for_capacity,
        image=wanted.image,
        allow_unreaped=wanted.allow_unreaped,
    )
    try:
        filled, attempts = _provisioner(lease, installation).provision(lease, terms)
    except ProvisionError as error:
        if not seen or any(attempt.tried for attempt in error.attempts):
            raise
        # Nothing was worth trying: why not says more than a list of offers.
        raise ProvisionError(seen[0].why_nothing(), attempts=error.attempts, code=error.code) from error
    try:
        remember(filled, wanted.request, installation)
    except OSError as error:
        # Only later processes miss it; the boxes are there and work.
        message = f"the handle of {lease.owner} is not kept: {error}"
        installation.listener(Progress("provision", "handle.unwritable", message))
    return filled, attempts


def launch_ddp(
    lease: Lease,
    spec: TrainingSpec,
    *,
    nproc: int,
    installation: Installation,
    options: LaunchOptions,
) -> JobResult:
    """Run a training on the boxes of a lease, follow it to its end, and fetch its outputs.

    A job of the same lease, key, entrypoint and arguments that runs already is re-attached to, so that it
    is started once however often this is called.

    Args:
        lease: From `provision_box`.
        spec: What to run.
        nproc: Processes on each box.
        installation: Whose keys and connections.
        options: Key, secrets, heartbeat, where logs go.

    Raises:
        BadRequest: When the lease has no boxes, or too little time left for a new job.
    """
    from gpu_flows.remote.loop import blocking

    return blocking(prepared_launch(lease, spec, nproc=nproc, installation=installation, options=options))


def prepared_launch(
    lease: Lease,
    spec: TrainingSpec,
    *,
    nproc: int,
    installation: Installation,
    options: LaunchOptions,
) -> Coroutine[Any, Any, JobResult]:
    """Do what a launch has to ask of the clouds, and return the rest of it: `launch_ddp` for who may cancel it.

    Args:
        lease: As for `launch_ddp`.
        spec: As for `launch_ddp`.
        nproc: As for `launch_ddp`.
        installation: As for `launch_ddp`.
        options: As for `launch_ddp`.

    Returns:
        A coroutine for the loop of `gpu_flows.remote.loop`. Cancelled, it leaves the job running.

    Raises:
        BadRequest: When the lease has no boxes.
    """
    from gpu_flows.training.launch import Node, launch

    if not lease.boxes:
        raise BadRequest(f"{lease.owner} holds no boxes: provision them first")
    settle = partial(_provisioner(lease, installation).settle_duplicates, lease)
    settle()
    nodes = [
        Node(
            index=leased.node,
            box=leased.box,
            remote=installation.remote(leased.box, lease.namespace),
            describe=partial(installation.cloud(leased.box.ref).describe, leased.box),
            deadline=leased.name.deadline,
        )
        for leased in lease.boxes
    ]

    def wanted() -> bool | None:
        return installation.liveness.wants(lease.owner, lease.namespace, lease.id)

    lag_s = max(cloud.capabilities.lag_s for cloud in installation.clouds(lease.clouds))
    followed = replace(options, wanted=wanted, settle=settle, settle_after_s=lag_s)
    return launch(nodes, lease.id, spec, nproc=nproc, options=followed)


def teardown_box(
    owner: str | Sequence[str] | Owner | Lease,
    *,
    installation: Installation,
    clouds: Sequence[str] | None = None,
    namespace: str | None = None,
    sole_creator: bool = False,
    timeout_s: float = TEARDOWN_TIMEOUT_S,
) -> TeardownReport:
    """End every box of an owner and prove it; interruptions wait until it is done.

    Args:
        owner: Whose boxes, or the lease.
        installation: Whose clouds.
        clouds: Where the request may have rented; joined with what this machine's journal knows. Without
            either, every configured cloud is asked.
        namespace: The namespace; that of the installation unless given.
        sole_creator: Whether every create of the lease was sent by this machine.
        timeout_s: How long to go on trying.

    Raises:
        TeardownFailed: When it cannot be proven that all is gone; after everything has been tried.
    """
    if isinstance(owner, Lease):
        clouds = list(dict.fromkeys([*(clouds or ()), *owner.clouds]))
        namespace = owner.namespace
        owner = owner.owner
    who = owner_of(owner)
    named = list(clouds or ())
    space = namespace or installation.namespace(named or installation.configured_clouds())
    journal = installation.journal(who, space)
    # What the request and the journal name; without either, everything that is configured.
    refs = list(dict.fromkeys([*named, *sorted(journal.clouds())])) or installation.configured_clouds()
    installation.listener(Progress("teardown", "phase.began", ""))
    return shielded(
        partial(
            teardown,
            who,
            space,
            installation.clouds(refs),
            journal=journal,
            may_hold=named,
            sole_creator=sole_creator,
            timeout_s=timeout_s,
            clock=installation.clock,
            listener=installation.listener,
        )
    )


@contextmanager
def held(
    owner: Owner, wanted: Rental, *, installation: Installation, detach: bool = False
) -> Iterator[tuple[Lease, Watchdog]]:
    """Hold a lease for the length of a scope: a watchdog beside it, and a teardown at its end.

    Args:
        owner: Who answers for the boxes.
        wanted: What is to be rented.
        installation: Whose clouds.
        detach: Keep the boxes after a scope that ends well; their dead-man ends them at the deadline.

    Yields:
        The lease, still without boxes, and its watchdog.

    Raises:
        TeardownFailed: From the end of the scope. When the scope itself failed, that error is raised, with
            the failed teardown as a note.
    """
    lease = reserve(owner, wanted, installation=installation, detached=detach)
    watchdog = start_watchdog(
        lease,
        clouds=[installation.options(ref) for ref in lease.clouds],
        journals=installation.settings.journals,
        log=installation.run_folder(lease.id) / "watchdog.log",
    )
    try:
        yield lease, watchdog
    except BaseException as failure:
        try:
            teardown_box(lease, installation=installation, sole_creator=True)
        except Exception as left:  # noqa: BLE001 - shown, and kept as a note of the first failure
            # The first failure is the cause; what is left alive must be seen all the same.
            failure.add_note(f"and the teardown failed: {left}")
            installation.listener(Progress("teardown", "teardown.failed", str(left)))
        else:
            watchdog.disarm()
        raise
    if not detach:
        # A failed teardown leaves the watchdog armed: it goes on trying when this process ends.
        teardown_box(lease, installation=installation, sole_creator=True)
    watchdog.disarm()


@contextmanager
def gpu_box(
    name: str | Sequence[str],
    gpus: Any,
    *,
    installation: Installation | None = None,
    **parameters: Any,
) -> Iterator[Lease]:
    """Rent boxes for the length of a ``with`` block.

    Args:
        name: Names the lease within this installation; two scopes of one name are the same lease.
        gpus: A request, or a list of them in order of preference.
        installation: Whose clouds; the default one of this machine unless given.
        **parameters: See `gpu_flows.runs.rental.rental`.

    Yields:
        The lease with its boxes, ready and checked.
    """
    with _installation(installation) as here:
        wanted = rental(gpus, settings=here.settings, **parameters)
        with held(owner_of(name), wanted, installation=here) as (lease, _):
            filled, _attempts = provision_box(lease, wanted, installation=here)
            yield filled


def _provisioner(lease: Lease, installation: Installation) -> Provisioner:
    from gpu_flows.leases.deadman import boot_script

    handle = remembered(lease.owner, lease.namespace, installation)
    check = SshCheck(installation, lease.namespace, pins=handle.pins if handle else None)
    return Provisioner(
        installation.clouds(lease.clouds),
        journal=installation.journal(lease.owner, lease.namespace),
        public_key=lambda cloud: installation.identity(cloud, lease.namespace).public_key,
        boot_script=boot_script,
        check=check,
        liveness=installation.liveness,
        job_started=check.job_started,
        blocked=installation.blocked,
        clock=installation.clock,
        listener=installation.listener,
    )


@contextmanager
def _installation(given: Installation | None) -> Iterator[Installation]:
    if given is not None:
        yield given
        return
    with Installation() as fresh:
        yield fresh


__all__: Sequence[str] = (
    "gpu_box",
    "held",
    "launch_ddp",
    "owner_of",
    "prepared_launch",
    "provision_box",
    "reserve",
    "resolve_gpu",
    "teardown_box",
)
