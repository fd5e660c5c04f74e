"""The steps as Prefect tasks, with the parameters of the Python functions of the same names.

What comes back is plain JSON and holds no secret. Only what may be repeated is retried, and nothing is cached: a
cached box is a box that is not there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.tasks import exponential_backoff

from gpu_flows.errors import BadRequest, GpuFlowsError
from gpu_flows.leases.lease import Lease, Owner
from gpu_flows.leases.provision import ProvisionError
from gpu_flows.runs import steps
from gpu_flows.runs.rental import rental
from prefect_blocks.accounts import Account, open_installation, refs_of
from prefect_blocks.boxes import GpuBox, gpu_box, provisioned, write_down
from prefect_blocks.ledger import Entry, owner_in_flow
from prefect_blocks.telling import Courier, artifact_key

Clouds = Sequence[Account] | Account | None


def may_be_repeated(_task: Any, _run: Any, state: Any) -> bool:
    """Tell Prefect whether a failed step is worth another try: a wrong request never is.

    Args:
        state: The failed state of the task run.
    """
    from gpu_flows.training.causes import TrainingError

    error = state.result(raise_on_failure=False, _sync=True)
    # Renting has walked every offer itself, and a training that failed will fail again.
    final = (BadRequest, ProvisionError, TrainingError)
    return isinstance(error, GpuFlowsError | OSError | TimeoutError) and not isinstance(error, final)


_BACKOFF: dict[str, Any] = {
    "retry_delay_seconds": exponential_backoff(2),
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": may_be_repeated,
}


@task(cache_policy=NO_CACHE, retries=2, **_BACKOFF)
def resolve_gpu(gpus: Any, *, clouds: Clouds = None, **parameters: Any) -> dict[str, Any]:
    """Ask the clouds what can be rented now, and rank it; spends nothing.

    Args:
        gpus: A request such as ``"H100:8"``, or a list of them in order of preference.
        clouds: Names of clouds and blocks of credentials, in order.
        **parameters: See `gpu_flows.runs.rental.rental`.

    Returns:
        The offers in the order in which they are worth trying, and the clouds that did not answer.
    """
    with Courier(get_run_logger()) as courier, open_installation(clouds, listener=courier.listen) as here:
        found = steps.resolve_gpu(gpus, installation=here, clouds=refs_of(clouds), **parameters)
        for ref, reason in found.silent.items():
            get_run_logger().warning("%s gave no offers: %s", ref, reason)
        return found.to_json()


@task(cache_policy=NO_CACHE)
def reserve(
    name: str, gpus: Any, *, key: str = "0", clouds: Clouds = None, **parameters: Any
) -> dict[str, Any]:
    """Compute the lease of this flow run, and write it where teardown, hooks and reaper find it; asks no cloud.

    Args:
        name: Names the lease within the flow run.
        gpus: A request, or a list of them in order of preference.
        key: Tells leases of the same name apart.
        clouds: Names of clouds and blocks of credentials, in order.
        **parameters: See `gpu_flows.runs.rental.rental`.

    Returns:
        The handle for `provision_box`, without boxes.
    """
    with Courier(get_run_logger()) as courier, open_installation(clouds, listener=courier.listen) as here:
        wanted = rental(gpus, settings=here.settings, clouds=refs_of(clouds), **parameters)
        owner = owner_in_flow(name, key)
        write_down(Entry(owner, here.namespace(wanted.clouds), wanted.clouds), courier)
        lease = steps.reserve(owner, wanted, installation=here)
        return _handle(lease, wanted).to_json()


@task(cache_policy=NO_CACHE, retries=2, **_BACKOFF)
def provision_box(
    reserved: Mapping[str, Any], gpus: Any, *, clouds: Clouds = None, **parameters: Any
) -> dict[str, Any]:
    """Rent the boxes of a lease, failing over until every node is ready and checked.

    Repeating it finds the boxes of an earlier attempt instead of renting more. They stay when the task has ended:
    `teardown_box` ends them, the hooks in `prefect_blocks.CLEANUP` where it does not come to that, and their
    deadline.

    Args:
        reserved: From `reserve`.
        gpus: As for `reserve`.
        clouds: As for `reserve`.
        **parameters: As for `reserve`.

    Returns:
        The handle with the boxes, for `launch_ddp`.
    """
    lease = Lease.from_json(reserved["lease"])
    with Courier(get_run_logger()) as courier, open_installation(clouds, listener=courier.listen) as here:
        wanted = rental(gpus, settings=here.settings, clouds=refs_of(clouds), **parameters)
        artifact = artifact_key(*lease.owner.parts[2:])
        return _handle(provisioned(lease, wanted, here, courier, artifact), wanted).to_json()


@task(cache_policy=NO_CACHE, retries=2, **_BACKOFF)
def launch_ddp(
    box: GpuBox | Mapping[str, Any],
    entrypoint: str | None = None,
    *,
    spec: Any = None,
    key: str = "",
    heartbeat_timeout_s: float | None = 1800,
    **fields: Any,
) -> dict[str, Any]:
    """Run a training on rented boxes, follow it to its end, and fetch its outputs.

    A retry re-attaches to the job where it runs already, so it is started once.

    Args:
        box: From `gpu_box` or `provision_box`.
        entrypoint: What to run; see `gpu_flows.TrainingSpec`. Not together with ``spec``.
        spec: What to run, as a whole.
        key: Tells two jobs on the same boxes apart that have the same entrypoint and arguments.
        heartbeat_timeout_s: How long the boxes live on without hearing from us; None for their deadline alone.
        **fields: Fields of `gpu_flows.TrainingSpec`: ``code``, ``args``, ``outputs`` ...

    Returns:
        The report.

    Raises:
        TrainingError: The one that is named after the cause (`gpu_flows.training.causes`), when it did not end well.
    """
    from gpu_flows.training.spec import TrainingSpec

    boxes = box if isinstance(box, GpuBox) else GpuBox.from_json(box)
    if spec is None:
        if entrypoint is None:
            raise BadRequest("nothing to run", hint='give an entrypoint such as "train.py", or spec=')
        fields.setdefault("nodes", boxes.lease.nodes)
        fields.setdefault("max_duration", boxes.max_duration)
        spec = TrainingSpec(entrypoint=entrypoint, **fields)
    elif entrypoint is not None or fields:
        raise BadRequest(f"give {'entrypoint' if entrypoint else sorted(fields)[0]} in the spec, or no spec")
    with Courier(get_run_logger()) as courier:
        report = boxes.run(spec, courier, key=key, heartbeat_timeout_s=heartbeat_timeout_s)
    return checked(report)


@task(cache_policy=NO_CACHE, retries=3, **_BACKOFF)
def teardown_box(
    box: GpuBox | Mapping[str, Any] | str,
    *,
    key: str = "0",
    clouds: Clouds = None,
    timeout_s: float = steps.TEARDOWN_TIMEOUT_S,
) -> dict[str, Any]:
    """End every box of a lease of this flow run and prove it; repeating it does no harm.

    Args:
        box: The boxes, the handle, or the name that they were reserved under.
        key: The key, with a name.
        clouds: Where the boxes may be, with a name; joined with what this machine's journal knows.
        timeout_s: How long to go on trying.

    Returns:
        What was ended.

    Raises:
        TeardownFailed: When it cannot be proven that all is gone.
    """
    owner: Owner | Lease
    if isinstance(box, str):
        owner = owner_in_flow(box, key)
    else:
        owner = box.lease if isinstance(box, GpuBox) else Lease.from_json(box["lease"])
    with Courier(get_run_logger()) as courier, open_installation(clouds, listener=courier.listen) as here:
        ended = steps.teardown_box(owner, installation=here, clouds=refs_of(clouds), timeout_s=timeout_s)
        return ended.to_json()


@task(cache_policy=NO_CACHE)
def run(
    entrypoint: str,
    *,
    gpus: Any,
    name: str = "train",
    key: str | None = None,
    clouds: Clouds = None,
    limit: str | None = None,
    **parameters: Any,
) -> dict[str, Any]:
    """Rent boxes, train on them, fetch the outputs, and give the boxes back: one cell of a sweep with ``.map()``.

    Args:
        entrypoint: What to run.
        gpus: A request, or a list of them in order of preference.
        name: Names the lease within the flow run.
        key: Tells cells apart; computed from the parameters unless given.
        clouds: Names of clouds and blocks of credentials, in order.
        limit: A global concurrency limit of Prefect that bounds the boxes.
        **parameters: Fields of `gpu_flows.TrainingSpec`, and the parameters of `gpu_flows.runs.rental.rental`.

    Returns:
        The report.

    Raises:
        TrainingError: When it did not end well.
        BadRequest: When a cell of the same key runs already.
    """
    from gpu_flows.training.spec import TrainingSpec

    known = set(TrainingSpec.model_fields)
    fields = {each: value for each, value in parameters.items() if each in known}
    renting = {each: value for each, value in parameters.items() if each not in known or each in _SHARED}
    spec = TrainingSpec(entrypoint=entrypoint, **fields)
    cell = cell_key(entrypoint, spec) if key is None else key
    with (
        gpu_box(name, gpus, key=cell, clouds=clouds, limit=limit, **renting) as box,
        Courier(get_run_logger()) as courier,
    ):
        box.run(spec, courier, key="", heartbeat_timeout_s=1800)
    # By now the boxes are gone, and the whole cost is known.
    return checked(box.jobs[-1])


_SHARED = {"nodes", "image", "max_duration"}
"""Parameters of both the renting and the job."""


def cell_key(entrypoint: str, spec: Any) -> str:
    """Return what tells this training from another one of a sweep: a hash of all its parameters."""
    import hashlib
    import json

    text = json.dumps([entrypoint, spec.to_json()], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def checked(report: Any) -> dict[str, Any]:
    """Return the report of a training that ended well as plain JSON.

    Raises:
        TrainingError: The one that is named after the cause.
    """
    from gpu_flows.training.causes import Diagnosis, ExitCause

    if report.cause != ExitCause.SUCCEEDED.value:
        diagnosis = Diagnosis(
            cause=ExitCause(report.cause),
            sentence=report.sentence,
            exit_code=report.exit_code,
            traceback=report.traceback,
        )
        failure = diagnosis.error()
        assert failure is not None  # noqa: S101 - every cause but success has one
        raise failure
    data: dict[str, Any] = report.to_json()
    return data


def _handle(lease: Lease, wanted: Any) -> GpuBox:
    return GpuBox(lease, wanted.request, max_duration=wanted.max_duration, max_cost=wanted.max_cost)


__all__ = (
    "launch_ddp",
    "may_be_repeated",
    "provision_box",
    "reserve",
    "resolve_gpu",
    "run",
    "teardown_box",
)
