"""Giving back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow_provider.operators.base import GpuFlowsOperator

if TYPE_CHECKING:
    from airflow.sdk import Context


class TeardownOperator(GpuFlowsOperator):
    """End every box of a lease and prove it; needs nothing from the task that rented them.

    The boxes are found at the clouds, by the name that the run and the group give them.

    Args:
        box: Which box, from `gpu_box`; or a name.
        clouds: Where it may have been rented; what `gpu_box` says unless given, joined with what this
            machine's journal knows; without either, every configured cloud is asked.
        timeout_s: How long one attempt goes on trying.
    """

    template_fields: Sequence[str] = ("box", "clouds")
    ui_color = "#f9e9e4"

    def __init__(
        self,
        *,
        box: Mapping[str, Any] | str,
        clouds: Sequence[str] | str | None = None,
        timeout_s: float = 600.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.box = box
        self.clouds = clouds
        self.timeout_s = timeout_s

    def execute(self, context: Context) -> dict[str, Any]:
        """Tear down, and return what was ended."""
        from airflow_provider.boxes import refs_of
        from gpu_flows.runs.steps import teardown_box

        with self.installation() as here:
            report = teardown_box(
                self.box_owner(self.box, context),
                installation=here,
                clouds=refs_of(self.box, self.clouds, here.settings),
                timeout_s=self.timeout_s,
            )
        for box in report.ended:
            self.log.info("gone: %s", box.id)
        if not report.ended:
            self.log.info("there was nothing to end")
        return report.to_json()

    def on_kill(self) -> None:
        """Go on: every second that is left serves to end a box, and a retry repeats what is cut off."""
        self.log.warning("killed while tearing down; the next attempt, or the reaper, looks again")
