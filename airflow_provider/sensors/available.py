"""Waiting for GPUs before anything else is done."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow_provider._compat import AirflowException
from airflow_provider.operators.base import RentingOperator

if TYPE_CHECKING:
    from airflow.sdk import Context


class GpuAvailableSensor(RentingOperator):
    """Wait until an offer under the conditions exists; spends nothing.

    That there is one does not hold it: the task that rents walks the offers anew.

    Args:
        timeout: Seconds to wait.
        poll_interval: Seconds between two looks.
        deferrable: Free the worker slot meanwhile; Airflow's default unless given.
        **kwargs: As for `RentingOperator`.
    """

    template_fields: Sequence[str] = RentingOperator.RENTAL
    ui_color = "#e6f1f2"

    def __init__(
        self,
        *,
        timeout: timedelta | float = 7 * 24 * 3600,
        poll_interval: float = 60.0,
        deferrable: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.timeout = timeout
        self.poll_interval = poll_interval
        self.deferrable = deferrable

    def execute(self, context: Context) -> int:
        """Wait; return how many offers there are."""
        import asyncio

        from airflow_provider.operators.provision import plain
        from airflow_provider.settings import default_deferrable
        from airflow_provider.triggers.capacity import CapacityTrigger

        with self.installation() as here:
            # What is wrong with the question is found out before a triggerer waits for the answer.
            self.rental(here.settings)
        wait_s = self.timeout.total_seconds() if isinstance(self.timeout, timedelta) else self.timeout
        trigger = CapacityTrigger(
            parameters=plain(self.rental_parameters()),
            until=(datetime.now(UTC) + timedelta(seconds=wait_s)).isoformat(),
            poll_interval=self.poll_interval,
        )
        if default_deferrable() if self.deferrable is None else self.deferrable:
            self.defer(trigger=trigger, method_name="execute_complete")

        async def first() -> Any:
            async for event in trigger.run():
                return event.payload
            return None

        return self.execute_complete(context, asyncio.run(first()))

    def execute_complete(self, context: Context, event: dict[str, Any]) -> int:
        """Return how many offers there are; fail when the wait was in vain."""
        if event["error"]:
            raise AirflowException(event["error"])
        return int(event["offers"])
