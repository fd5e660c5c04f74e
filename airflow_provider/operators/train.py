"""All of it in one task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow_provider._compat import AirflowException
from airflow_provider.operators.base import RentingOperator
from airflow_provider.operators.training import TrainingOperator

if TYPE_CHECKING:
    from airflow.sdk import Context


class TrainingFailed(AirflowException):
    """The training did not succeed, or something of it may still bill; the message says which."""


class GpuTrainOperator(TrainingOperator, RentingOperator):
    """Rent, train, fetch the outputs and give back, in one task that keeps its worker slot.

    The box is given back in a ``finally``; a watchdog beside the task does it when the task is killed, so
    nothing has to be wired. For many cells use ``expand``: each map index has a box of its own, and the
    slots of a pool bound how many there are at once.

    The XCom is the report (`gpu_flows.RunReport.to_json`). It takes the arguments of `TrainingOperator`
    and `RentingOperator`.
    """

    template_fields: Sequence[str] = (*RentingOperator.RENTAL, *TrainingOperator.SPEC)

    def execute(self, context: Context) -> dict[str, Any]:
        """Run the whole of it.

        Raises:
            TrainingFailed: When the training failed, boxes could not be had, or could not be given back.
        """
        from airflow_provider.installation import find_secret
        from gpu_flows.runs.run import Following, run

        with self.installation() as here:
            wanted = self.rental(here.settings)
            spec = self.training_spec(
                context, nodes=wanted.nodes, max_duration=wanted.max_duration, image=self.image
            )
            owner = self.box_owner({"name": self.task_id, "mapped": True}, context)
            shared = {"nodes", "image", "max_duration"}
            report = run(
                spec=spec,
                name=owner,
                installation=here,
                following=Following(
                    heartbeat_timeout_s=self.heartbeat_timeout_s,
                    show_line=self.show_line,
                    find_secret=find_secret,
                ),
                **{name: value for name, value in self.rental_parameters().items() if name not in shared},
            )
        data = self.deliver(report.to_json(), spec)
        for attempt in report.attempts:
            if attempt.code != "OK":
                self.log.warning("%s %s: %s", attempt.cloud, attempt.instance_type, attempt.reason)
        if not report.ok:
            left = f"; left: {'; '.join(report.left)}" if report.left else ""
            raise TrainingFailed(f"{report.sentence}{left}\n{report.traceback}".strip())
        self.log.info("%s; %s", report.sentence, report.cost)
        return data
