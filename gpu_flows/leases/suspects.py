"""Clouds that take no name in the create call: which of their boxes may be ours and do not say so.

A box gets its name there in a second call. Whoever is killed between the two leaves a box without one, which looks
like a box that somebody else has just made: it is named to a person, and never touched.
"""

from __future__ import annotations

import contextlib
from typing import Any

from gpu_flows.clouds.base import BoxState, Cloud, ref_of
from gpu_flows.leases.journal import FAILED, Journal, JournalUnwritable


def unnamed_boxes(cloud: Cloud) -> list[str]:
    """Return the ids of the account's boxes that carry no name; none on a cloud that takes it in the create call.

    Raises:
        CloudError: When they cannot be listed.
    """
    if cloud.capabilities.names_at_create:
        return []
    return sorted(box.id for box in cloud.find("") if not box.name and box.state is not BoxState.GONE)


def suspected_boxes(cloud: Cloud, journal: Journal) -> list[str]:
    """Return the ids of boxes that may be of this lease: without a name, and not there before an unsettled create.

    Args:
        cloud: Where to look.
        journal: This machine's journal of the lease, which knows what was there before.

    Raises:
        CloudError: When the boxes cannot be listed.
    """
    intents = _unsettled(cloud, journal)
    if not intents:
        return []
    now = unnamed_boxes(cloud)
    return [box_id for box_id in now if any(box_id not in entry.get("unnamed", ()) for entry in intents)]


def settle(cloud: Cloud, journal: Journal) -> None:
    """Remember that the unsettled creates of a lease have made nothing: no box may be theirs any more.

    Later boxes of other people are then no suspects of this lease.
    """
    for entry in _unsettled(cloud, journal):
        # Unwritten, it is found out once more by the next teardown.
        with contextlib.suppress(JournalUnwritable):
            journal.record(FAILED, cloud=ref_of(cloud), name=entry["name"], code="NOTHING_FOUND")


def described(cloud: Cloud, suspects: list[str]) -> str:
    """Return what a person has to know about suspects."""
    return (
        f"{ref_of(cloud)} has boxes without a name, {', '.join(suspects)}, since a create of which nobody knows how "
        "it ended: they may be ours and bill, or somebody else's"
    )


def _unsettled(cloud: Cloud, journal: Journal) -> list[dict[str, Any]]:
    if cloud.capabilities.names_at_create:
        return []
    return [entry for entry in journal.unsettled() if entry["cloud"] == ref_of(cloud)]
