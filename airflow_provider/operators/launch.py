"""Training on a box that is held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow_provider._compat import AirflowException
from airflow_provider.operators.training import TrainingOperator

if TYPE_CHECKING:
    from airflow.sdk import Context

    from gpu_flows.leases.lease import Lease, Owner
    from gpu_flows.runs.installation import Installation
    from gpu_flows.training.causes import Diagnosis
    from gpu_flows.training.spec import TrainingSpec

_ERRORS = 5
"""How often in a row a trigger may fail to follow before the task fails."""

_DEFAULT_DURATION = timedelta(hours=24)


class LaunchDDPOperator(TrainingOperator):
    """Run a training on the boxes that are held for this run, and follow it to its end.

    The boxes are found at the clouds by their owner, not by an XCom. A retry finds the job running and
    follows it on; it starts no second one. The XCom is the report (`gpu_flows.RunReport.to_json`).

    Args:
        box: Which box, from `gpu_box`; or a name.
        clouds: Where it is; what `gpu_box` says unless given.
        max_duration: Of the job; that of the box unless given.
        max_cost: Dollars for all boxes of the lease; that of the box unless given.
        nodes: Number of boxes; that of the box unless given.
        deferrable: Free the worker slot while the job runs; Airflow's default unless given.
        **kwargs: As for `TrainingOperator`.
    """

    template_fields: Sequence[str] = ("box", "clouds", "max_duration", "max_cost", *TrainingOperator.SPEC)

    def __init__(
        self,
        *,
        box: Mapping[str, Any] | str,
        clouds: Sequence[str] | str | None = None,
        max_duration: timedelta | float | str | None = None,
        max_cost: float | str | None = None,
        deferrable: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.box = box
        self.clouds = clouds
        self.max_duration = max_duration
        self.max_cost = max_cost
        self.deferrable = deferrable

    def execute(self, context: Context, errors: int = 0) -> dict[str, Any]:
        """Start the job or find it started; follow it here, or leave that to the triggerer."""
        from airflow_provider.settings import default_deferrable

        if not (default_deferrable() if self.deferrable is None else self.deferrable):
            return self._followed(context)
        from airflow_provider.boxes import refs_of
        from gpu_flows.runs.steps import launch_ddp

        with self.installation() as here:
            lease, spec, secrets = self._found(context, here)
            nproc = self._nproc(spec, lease, here)
            options = self._options(lease, here, secrets, context, detach=True)
            started = launch_ddp(lease, spec, nproc=nproc, installation=here, options=options)
            self.log.info("job %s runs; the triggerer follows it", started.job_id)
            refs = refs_of(self.box, self.clouds, here.settings)
        self._leave_to_triggerer(context, lease, spec, nproc, refs, errors)
        raise AssertionError("unreachable: defer raises")

    def execute_complete(self, context: Context, event: dict[str, Any], errors: int = 0) -> dict[str, Any]:
        """Judge the end of a job that a trigger has followed, and fetch its outputs.

        Raises:
            TrainingError: When the training failed.
        """
        match event["status"]:
            case "ended":
                return self._followed(context, diagnosis=_diagnosis(event["diagnosis"]))
            case "timeout":
                raise AirflowException(f"{self.task_id}: {event['error']}")
        if errors + 1 >= _ERRORS:
            raise AirflowException(f"the job cannot be followed: {event['error']}")
        self.log.warning("following was interrupted: %s", event["error"])
        return self.execute(context, errors + 1)

    def _followed(self, context: Context, diagnosis: Diagnosis | None = None) -> dict[str, Any]:
        """Launch and follow within this process; with a diagnosis, only collect what is left of a job."""
        from gpu_flows.errors import GpuFlowsError
        from gpu_flows.runs.outcome import Outcome
        from gpu_flows.runs.steps import launch_ddp

        told = diagnosis.error() if diagnosis else None
        with self.installation() as here:
            try:
                lease, spec, secrets = self._found(context, here)
                outcome = Outcome(lease.owner, lease.namespace, str(self._asked() or ""), here)
                outcome.lease, outcome.detached = lease, True
                options = self._options(lease, here, secrets, context, collect=diagnosis is not None)
                result = launch_ddp(
                    lease, spec, nproc=self._nproc(spec, lease, here), installation=here, options=options
                )
            except GpuFlowsError as error:
                if told is None:
                    raise
                # The box has gone since: what the trigger saw says more.
                raise told from error
            outcome.result = replace(result, diagnosis=diagnosis or result.diagnosis)
            outcome.seconds.update(result.seconds)
            report = outcome.finish().to_json()
        report = self.deliver(report, spec)
        for missing in report["not_fetched"]:
            self.log.warning("not fetched: %s", missing)
        self.log.info("%s", report["sentence"])
        judged = outcome.result.diagnosis
        failed = judged.error() if judged else None
        if failed is not None:
            raise failed
        return report

    def _found(self, context: Context, here: Installation) -> tuple[Lease, TrainingSpec, dict[str, str]]:
        """Find the boxes, and check what is to run on them."""
        from airflow_provider.boxes import refs_of
        from airflow_provider.installation import find_secret
        from gpu_flows.runs.lookup import find_lease
        from gpu_flows.runs.rental import duration

        from_box = {} if isinstance(self.box, str) else self.box
        longest = self.max_duration or from_box.get("max_duration") or _DEFAULT_DURATION
        spec = self.training_spec(
            context, nodes=int(from_box.get("nodes") or 1), max_duration=duration("max_duration", longest)
        )
        secrets = spec.resolve_secrets(find_secret)
        owner, refs = self.box_owner(self.box, context), refs_of(self.box, self.clouds, here.settings)
        self._learn_pins(context, here, owner, here.namespace(refs or here.configured_clouds()))
        lease = find_lease(owner, here, clouds=refs, needs_pins=bool(secrets))
        return lease, spec, secrets

    def _learn_pins(self, context: Context, here: Installation, owner: Owner, namespace: str) -> None:
        """Take the host keys from the task that rented, where another worker did: without them no secret is sent.

        They only ever confirm a box that the cloud has named; a missing XCom costs nothing else.
        """
        from gpu_flows.gpus.request import GpuRequest
        from gpu_flows.leases.lease import Lease
        from gpu_flows.runs.handle import remember, remembered

        if isinstance(self.box, str) or not self.box.get("provision") or not self._asked():
            return
        if remembered(owner, namespace, here) is not None:
            return
        ti = context["ti"]
        told = ti.xcom_pull(
            task_ids=self.box["provision"], map_indexes=ti.map_index if self.box.get("mapped") else -1
        )
        if isinstance(told, dict) and told.get("boxes"):
            lease = Lease.from_json(told)
            if (lease.owner, lease.namespace) == (owner, namespace):
                remember(lease, GpuRequest.parse(self._asked()), here)

    def _asked(self) -> Any:
        return None if isinstance(self.box, str) else self.box.get("gpus")

    def _nproc(self, spec: TrainingSpec, lease: Lease, here: Installation) -> int:
        """Return the processes of each node: one per GPU that was asked for, or the N of ``cpu:N``."""
        from gpu_flows.gpus.request import GpuRequest
        from gpu_flows.runs.handle import asked_for, remembered

        handle = remembered(lease.owner, lease.namespace, here)
        request = handle.request if handle else GpuRequest.parse(self._asked()) if self._asked() else None
        box = lease.boxes[0]
        if request is None or (box.offer is None and not request.is_cpu):
            return spec.processes(gpus=box.box.gpu_count)
        gpus, cpus = asked_for(request, box.offer)
        return spec.processes(gpus=gpus, cpus=cpus)

    def _key(self, context: Context) -> str:
        """Return what tells the jobs of several tasks on one box apart."""
        index = context["ti"].map_index
        return self.task_id if index is None or index < 0 else f"{self.task_id}-{index}"

    def _cost(self) -> float | None:
        told = self.max_cost if isinstance(self.box, str) else self.max_cost or self.box.get("max_cost")
        return float(told) if told not in (None, "", "None") else None

    def _options(
        self,
        lease: Lease,
        here: Installation,
        secrets: dict[str, str],
        context: Context,
        *,
        detach: bool = False,
        collect: bool = False,
    ) -> Any:
        from gpu_flows.runs.run import Following, launch_options

        following = Following(
            key=self._key(context),
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            detach=detach,
            show_line=None if collect else self.show_line,
        )
        options = launch_options(lease, following, installation=here, secrets=secrets, max_cost=self._cost())
        return replace(options, only_attach=collect)

    def _leave_to_triggerer(
        self,
        context: Context,
        lease: Lease,
        spec: TrainingSpec,
        nproc: int,
        refs: list[str] | None,
        errors: int,
    ) -> None:
        from airflow_provider.triggers.follow import FollowJobTrigger

        until = lease.deadline or datetime.now(UTC) + spec.max_duration
        began = context["ti"].start_date
        if self.execution_timeout is not None and began is not None:
            # Airflow does not enforce it while a task is deferred.
            until = min(until, began + self.execution_timeout)
        # A trigger fetches nothing: what it wrote would lie on the triggerer.
        followed = spec.model_copy(update={"outputs": ()})
        self.defer(
            trigger=FollowJobTrigger(
                owner=list(lease.owner.parts),
                clouds=refs,
                spec=followed.to_json(),
                key=self._key(context),
                nproc=nproc,
                until=until.isoformat(),
                heartbeat_timeout_s=self.heartbeat_timeout_s,
                max_cost=self._cost(),
            ),
            method_name="execute_complete",
            kwargs={"errors": errors},
        )


def _diagnosis(data: Mapping[str, Any]) -> Diagnosis:
    from gpu_flows.training.causes import Diagnosis, ExitCause

    return Diagnosis(**{**data, "cause": ExitCause(data["cause"])})
