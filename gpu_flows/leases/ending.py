"""Ending one box for good: the delete is sent first, and then proven."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from gpu_flows.clock import Clock
from gpu_flows.clouds.base import Box, BoxState, Cloud, ref_of
from gpu_flows.clouds.errors import CloudError
from gpu_flows.errors import GpuFlowsError
from gpu_flows.leases import journal as events
from gpu_flows.leases.journal import Journal, JournalUnwritable
from gpu_flows.progress import Listener, Progress

POLL_S = 2.0
RESEND_AFTER_S = 15.0
"""A delete that has shown no effect for so long is sent again."""


class NotProvenGone(GpuFlowsError):
    """A box was asked to end, and nobody can say that it did."""

    code = "NOT_PROVEN_GONE"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedBox:
    """A box that is proven to be gone.

    Attributes:
        cloud: ``cloud`` or ``cloud@account``.
        id: The cloud's id.
        name: The name it carried.
        usd_per_hour: Dollars per hour it was billed; None when nobody knows.
        created_at: When its bill began, aware.
        ended_at: When it ended, or was proven to have ended, aware.
        exact: Whether ``ended_at`` is the cloud's own word; else it is an upper bound.
        billing_step_s: Granularity of the bill.
        minimum_minutes: Shortest time that is billed.
    """

    cloud: str
    id: str
    name: str
    usd_per_hour: float | None
    created_at: datetime | None
    ended_at: datetime
    exact: bool
    billing_step_s: int = 1
    minimum_minutes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain JSON values."""
        return {
            "cloud": self.cloud,
            "id": self.id,
            "name": self.name,
            "usd_per_hour": self.usd_per_hour,
            "created_at": self.created_at.isoformat() if self.created_at else None,
            "ended_at": self.ended_at.isoformat(),
            "exact": self.exact,
            "billing_step_s": self.billing_step_s,
            "minimum_minutes": self.minimum_minutes,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EndedBox:
        """Rebuild a record from what `to_json` returned."""
        values = dict(data)
        for key in ("created_at", "ended_at"):
            values[key] = datetime.fromisoformat(values[key]) if values[key] else None
        return cls(**values)


def cloud_now(cloud: Cloud, clock: Clock) -> datetime:
    """Return the time by the cloud's own clock, as far as it has told it; else by ours."""
    return clock.now() + timedelta(seconds=cloud.clock_skew_s() or 0.0)


def end_box(
    cloud: Cloud, box: Box, *, clock: Clock, timeout_s: float, journal: Journal | None, listener: Listener
) -> EndedBox:
    """Destroy a box and wait until its cloud no longer knows it.

    Args:
        cloud: Who rents it out.
        box: The box, in any state.
        clock: Time and sleep.
        timeout_s: How long to go on trying.
        journal: Where the end is recorded; a journal that cannot be written never stops it.
        listener: Told what happens.

    Returns:
        The record of its end.

    Raises:
        NotProvenGone: At the deadline; the cloud's last error is chained.
    """
    until = clock.monotonic() + timeout_s
    last_error: CloudError | None = None
    sent_at: float | None = None
    now: Box | None = None
    while True:
        if sent_at is None or clock.monotonic() - sent_at >= RESEND_AFTER_S:
            try:
                cloud.destroy(box)
                sent_at, last_error = clock.monotonic(), None
                _remember(journal, events.DESTROYED, box)
            except CloudError as error:
                last_error = error
        try:
            now = cloud.describe(box)
        except CloudError as error:
            last_error = last_error or error
        else:
            if now.state is BoxState.GONE:
                return _record(cloud, box, now, clock, journal, listener)
        if clock.monotonic() >= until:
            state = f"it is still {now.state}" if now else "its state cannot be read"
            raise NotProvenGone(
                f"{ref_of(cloud)} box {box.id} ({box.name or 'without a name'}) was asked to end, but {state} "
                f"after {timeout_s:.0f} s",
                hint=f"look at {cloud.console_url(box) or 'the console of ' + cloud.name} and destroy it there",
            ) from last_error
        clock.sleep(min(POLL_S, max(0.0, until - clock.monotonic())))


def _record(
    cloud: Cloud, box: Box, now: Box, clock: Clock, journal: Journal | None, listener: Listener
) -> EndedBox:
    ended = EndedBox(
        cloud=ref_of(cloud),
        id=box.id,
        name=box.name,
        usd_per_hour=box.usd_per_hour,
        created_at=box.created_at,
        ended_at=now.ended_at or cloud_now(cloud, clock),
        exact=now.ended_at is not None,
        billing_step_s=box.details.get("billing_step_s", 1),
        minimum_minutes=box.details.get("minimum_minutes", 0),
    )
    _remember(journal, events.GONE, replace(box, ended_at=ended.ended_at), record=ended.to_json())
    listener(Progress("teardown", "box.gone", f"{ref_of(cloud)} box {box.id} is gone", ended.to_json()))
    return ended


def _remember(journal: Journal | None, event: str, box: Box, **more: Any) -> None:
    if journal is None:
        return
    ended_at = box.ended_at.isoformat() if box.ended_at else None
    # Destroying matters more than remembering it: on a full disk the box has to go all the same.
    with contextlib.suppress(JournalUnwritable):
        journal.record(event, name=box.name, id=box.id, cloud=box.cloud, ended_at=ended_at, **more)
