"""Waiting until something can be rented."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

if TYPE_CHECKING:
    from airflow_provider.triggers.beside import Beside


class CapacityTrigger(BaseTrigger):
    """Ask the clouds now and then until one has an offer under the conditions; spends nothing.

    The event says how many ``offers`` there are, and ``error`` when the time was over or the question is wrong.

    Args:
        parameters: Of `gpu_flows.runs.rental.rental`, as plain JSON values.
        until: When to give up, in ISO format.
        poll_interval: Seconds between two looks.
    """

    def __init__(self, *, parameters: dict[str, Any], until: str, poll_interval: float = 60.0) -> None:
        super().__init__()
        self.parameters = parameters
        self.until = until
        self.poll_interval = poll_interval

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return what rebuilds the trigger."""
        names = ("parameters", "until", "poll_interval")
        return f"{__name__}.CapacityTrigger", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Look until there is an offer or the time is over."""
        from airflow_provider.triggers.beside import Beside
        from gpu_flows.errors import BadRequest

        until = datetime.fromisoformat(self.until)
        while True:
            beside = Beside(self._look, lambda: None)
            async for level, line in beside.lines():
                self.log.log(level, "%s", line)
            if isinstance(beside.failure, BadRequest):
                # Asking again does not make it right.
                yield TriggerEvent({"offers": 0, "error": str(beside.failure)})
                return
            if beside.failure is not None:
                self.log.warning("the clouds could not be asked: %s", beside.failure)
            elif beside.result:
                yield TriggerEvent({"offers": beside.result, "error": None})
                return
            left_s = (until - datetime.now(UTC)).total_seconds()
            if left_s <= 0:
                yield TriggerEvent({"offers": 0, "error": f"there was no offer until {self.until}"})
                return
            # Jitter: a fleet of waiting tasks must not ask in step.
            await asyncio.sleep(min(left_s, self.poll_interval * random.uniform(0.8, 1.2)))  # noqa: S311

    def _look(self, log: Beside) -> int:
        from airflow_provider.installation import open_installation
        from gpu_flows.runs.rental import rental
        from gpu_flows.runs.resolve import resolve

        with open_installation(log) as here:
            found = resolve(rental(settings=here.settings, **self.parameters), here)
        if not found.available:
            log.info("%s", found.why_nothing())
        return len(found.available)
