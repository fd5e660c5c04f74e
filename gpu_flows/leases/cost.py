"""What a lease has cost, from its boxes' own ends; it never grows after they have ended."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from gpu_flows.leases.ending import EndedBox
from gpu_flows.leases.journal import GONE, Journal


@dataclass(frozen=True, slots=True)
class Cost:
    """Dollars, and how sure they are.

    Attributes:
        usd: Dollars; an upper bound unless exact.
        exact: Whether each end is the cloud's own word.
    """

    usd: float
    exact: bool

    def __str__(self) -> str:
        return f"${self.usd:.2f}" if self.exact else f"<= ${self.usd:.2f}, unverified"

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.usd + other.usd, self.exact and other.exact)

    def to_json(self) -> dict[str, Any]:
        """Return the cost as plain JSON values."""
        return {"usd": round(self.usd, 6), "exact": self.exact}


NOTHING = Cost(0.0, exact=True)


def cost_of(
    usd_per_hour: float | None,
    began: datetime | None,
    ended: datetime | None,
    *,
    exact: bool,
    billing_step_s: int = 1,
    minimum_minutes: int = 0,
) -> Cost:
    """Return what one box cost.

    Args:
        usd_per_hour: Its price; None when nobody knows.
        began: When its bill began, aware.
        ended: When it ended, aware.
        exact: Whether ``ended`` is the cloud's own word.
        billing_step_s: Granularity of the bill.
        minimum_minutes: Shortest time that is billed.
    """
    if usd_per_hour is None or began is None or ended is None:
        return Cost(0.0, exact=False)
    seconds = max(0.0, (ended - began).total_seconds(), minimum_minutes * 60.0)
    billed_s = math.ceil(seconds / billing_step_s) * billing_step_s
    return Cost(usd_per_hour * billed_s / 3600, exact=exact)


def cost_of_ended(boxes: Iterable[EndedBox]) -> Cost:
    """Return what boxes cost that are proven to be gone."""
    total = NOTHING
    for box in boxes:
        total += cost_of(
            box.usd_per_hour,
            box.created_at,
            box.ended_at,
            exact=box.exact,
            billing_step_s=box.billing_step_s,
            minimum_minutes=box.minimum_minutes,
        )
    return total


def cost_so_far(journal: Journal, now: datetime) -> Cost:
    """Return what a lease has cost by this machine's journal: its ended boxes, and the live ones until now.

    Args:
        journal: The lease's journal.
        now: The time, aware.
    """
    ended = {e["name"]: EndedBox.from_json(e["record"]) for e in journal.entries() if e["event"] == GONE}
    total = cost_of_ended(ended.values())
    for _, box in journal.live_boxes():
        total += Cost(cost_of(box.usd_per_hour, box.created_at, now, exact=True).usd, exact=False)
    return total
