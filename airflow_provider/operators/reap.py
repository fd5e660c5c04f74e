"""Ending what nobody wants any more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow_provider.operators.base import GpuFlowsOperator

if TYPE_CHECKING:
    from airflow.sdk import Context


class ReapOperator(GpuFlowsOperator):
    """End the boxes of this installation that are past their deadline, or whose run has ended.

    It belongs into a DAG of its own, in a file of its own: a DAG that is paused or broken reaps nothing.

    Args:
        clouds: Where to look; every configured cloud unless given.
        only_look: Only look, and tell what would be ended.
        timeout_s: How long to go on trying, for each box.
    """

    template_fields: Sequence[str] = ("clouds", "only_look")

    def __init__(
        self,
        *,
        clouds: Sequence[str] | str | None = None,
        only_look: bool | str = False,
        timeout_s: float = 600.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.clouds = clouds
        self.only_look = only_look
        self.timeout_s = timeout_s

    def execute(self, context: Context) -> dict[str, Any]:
        """Look, end, and return what was seen and what was ended.

        Raises:
            ReapFailed: When a box is left or a cloud could not be asked; after everything has been tried.
        """
        from airflow_provider.boxes import listed
        from gpu_flows.leases.reaper import reap, survey

        dry = (
            self.only_look
            if isinstance(self.only_look, bool)
            else self.only_look.strip().lower() in ("true", "1")
        )
        with self.installation() as here:
            refs = listed(self.clouds) or here.configured_clouds()
            clouds, journals = here.clouds(refs), here.settings.journals
            found = survey(
                clouds, here.namespace(refs), journals=journals, liveness=here.liveness, clock=here.clock
            )
            for seen in found.sightings:
                self.log.info("%s %s %s: %s", seen.cloud, seen.box.id, seen.box.name, seen.standing)
            ended = (
                []
                if dry
                else reap(
                    found,
                    clouds,
                    journals=journals,
                    timeout_s=self.timeout_s,
                    clock=here.clock,
                    listener=here.listener,
                )
            )
        return {
            "seen": [sighting.to_json() for sighting in found.sightings],
            "ended": [box.to_json() for box in ended],
            "unknown": list(found.unknown),
        }

    def on_kill(self) -> None:
        """Go on: every second that is left serves to end a box."""
