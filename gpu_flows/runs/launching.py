"""Launching on boxes that are held already, and following what was launched: the steps of separate processes."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_flows.errors import BadRequest, GpuFlowsError
from gpu_flows.leases.lease import Lease, Owner
from gpu_flows.leases.teardown import TeardownFailed
from gpu_flows.runs.handle import asked_for, remembered
from gpu_flows.runs.installation import Installation
from gpu_flows.runs.lookup import find_lease
from gpu_flows.runs.outcome import Outcome
from gpu_flows.runs.report import RunReport
from gpu_flows.runs.run import Following, launch_options
from gpu_flows.runs.steps import launch_ddp, teardown_box

if TYPE_CHECKING:
    from gpu_flows.training.spec import TrainingSpec

_ASK_TIMEOUT_S = 60.0


class AlreadyFollowed(BadRequest):
    """Another process of this machine follows the job, and writes its logs."""

    code = "ALREADY_FOLLOWED"


def launch_held(
    owner: str | Sequence[str] | Owner,
    spec: TrainingSpec,
    *,
    installation: Installation,
    clouds: Sequence[str] | None = None,
    following: Following | None = None,
) -> RunReport:
    """Run a training on the boxes that an owner holds; the boxes are left as they are.

    Args:
        owner: Who holds the boxes, from `provision_box`.
        spec: What to run.
        installation: Whose clouds and keys.
        clouds: Where the boxes are; what this machine's journal knows unless given.
        following: How the job is followed.

    Returns:
        The report. A training that failed is a report, too.

    Raises:
        BadRequest: When something is wrong with what was asked, or the owner holds no boxes.
    """
    from gpu_flows.training.sources import check_sources

    how = following or Following()
    check_sources(spec)
    secrets = spec.resolve_secrets(how.find_secret)
    lease = find_lease(owner, installation, clouds=clouds, needs_pins=bool(secrets))
    _check_not_held(lease, installation)
    handle = remembered(lease.owner, lease.namespace, installation)
    box = lease.boxes[0]
    gpus, cpus = asked_for(handle.request, box.offer) if handle else (box.box.gpu_count, 0)
    return _followed(
        lease, spec, how, installation, nproc=spec.processes(gpus=gpus, cpus=cpus), secrets=secrets
    )


def attach(
    owner: str | Sequence[str] | Owner,
    *,
    installation: Installation,
    clouds: Sequence[str] | None = None,
    following: Following | None = None,
    outputs_to: Path | None = None,
    ends: bool = False,
) -> RunReport:
    """Follow the last job of an owner to its end, from a process that did not start it, and fetch its outputs.

    Args:
        owner: Who holds the boxes.
        installation: Whose clouds and keys.
        clouds: Where the boxes are; what this machine's journal knows unless given.
        following: How the job is followed.
        outputs_to: Folder for its outputs; where the launch said unless given.
        ends: Tear the boxes down afterwards.

    Returns:
        The report.

    Raises:
        BadRequest: When the owner holds no boxes or no job was started on them, when a secret by which its log is
            masked is missing, or when another process of this machine follows it.
    """
    from gpu_flows.remote.loop import blocking
    from gpu_flows.training.memo import last_job

    how = following or Following()
    lease = find_lease(owner, installation, clouds=clouds)
    _check_not_held(lease, installation)
    remote = installation.remote(lease.boxes[0].box, lease.namespace)
    job = blocking(last_job(remote, timeout_s=_ASK_TIMEOUT_S))
    spec = job.spec if outputs_to is None else job.spec.model_copy(update={"outputs_to": outputs_to})
    # Not for the job, which has them: for the masking of its log.
    secrets = spec.resolve_secrets(how.find_secret)
    how = replace(how, key=job.key)
    return _followed(
        lease, spec, how, installation, nproc=job.nproc, secrets=secrets, only_attach=True, ends=ends
    )


def _followed(
    lease: Lease,
    spec: TrainingSpec,
    following: Following,
    here: Installation,
    *,
    nproc: int,
    secrets: dict[str, str],
    only_attach: bool = False,
    ends: bool = False,
) -> RunReport:
    handle = remembered(lease.owner, lease.namespace, here)
    outcome = Outcome(lease.owner, lease.namespace, str(handle.request) if handle else "", here)
    outcome.lease, outcome.detached = lease, not ends
    with _alone(here.run_folder(lease.id)), outcome.listening():
        try:
            options = launch_options(lease, following, installation=here, secrets=secrets)
            options = replace(options, only_attach=only_attach)
            outcome.result = launch_ddp(lease, spec, nproc=nproc, installation=here, options=options)
            outcome.seconds.update(outcome.result.seconds)
        except BadRequest:
            raise
        except GpuFlowsError as error:
            outcome.failure = error
        if ends:
            began = time.monotonic()
            try:
                teardown_box(lease, installation=here)
                outcome.seconds["teardown"] = time.monotonic() - began
            except TeardownFailed as error:
                outcome.left = list(error.failures)
    return outcome.finish()


def _check_not_held(lease: Lease, here: Installation) -> None:
    """Refuse boxes that a scope of this machine holds: they go when it ends, and it writes their logs."""
    wanted = here.liveness.wants(lease.owner, lease.namespace, lease.id)
    if wanted:
        raise AlreadyFollowed(
            f"a run of this machine holds the boxes of {lease.owner} and follows their job",
            hint="gpu-flows logs -f shows what it writes",
        )
    if wanted is False:
        raise BadRequest(
            f"the run that held the boxes of {lease.owner} has died, so they are being torn down",
            hint="start another run",
        )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep a second process of this machine from writing the same logs."""
    descriptor = os.open(folder / "following.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise AlreadyFollowed(
                "another process of this machine follows this job",
                hint="gpu-flows logs -f shows what it writes",
            ) from error
        yield
    finally:
        os.close(descriptor)


__all__ = ("AlreadyFollowed", "attach", "launch_held")
