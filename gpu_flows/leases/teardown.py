"""Ending every box of a lease, found by name alone, and proving it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from gpu_flows.clock import SYSTEM_CLOCK, Clock
from gpu_flows.clouds.base import Box, BoxState, Cloud, ref_of
from gpu_flows.clouds.errors import AuthenticationFailed, CloudError
from gpu_flows.errors import GpuFlowsError
from gpu_flows.leases.ending import POLL_S, EndedBox, NotProvenGone, cloud_now, end_box
from gpu_flows.leases.journal import Journal
from gpu_flows.leases.lease import Owner, boxes_of, lease_id, lease_prefix
from gpu_flows.leases.parallel import in_parallel
from gpu_flows.leases.suspects import described, settle, suspected_boxes
from gpu_flows.progress import Listener, ignore

CREATED_AFTER_TOLERANCE = timedelta(seconds=2)
"""Names carry whole seconds, and two machines of one installation do not agree to the second."""

_LOOK_AT_THEM = "look at them, and delete or describe them"


@dataclass(frozen=True, slots=True, kw_only=True)
class TeardownReport:
    """What a teardown did.

    Attributes:
        owner: Whose lease it was.
        lease: The lease id.
        ended: The boxes that this teardown ended, proven.
        not_asked: Clouds that could not be asked but where no create can have been sent, with the reason.
    """

    owner: Owner
    lease: str
    ended: tuple[EndedBox, ...]
    not_asked: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return {
            "owner": list(self.owner.parts),
            "lease": self.lease,
            "ended": [box.to_json() for box in self.ended],
            "not_asked": list(self.not_asked),
        }


class TeardownFailed(GpuFlowsError):
    """It cannot be proven that everything of a lease is gone.

    Args:
        message: What is left.
        ended: What this teardown could end all the same.
        failures: Why, by cloud.
    """

    code = "TEARDOWN_FAILED"

    def __init__(
        self, message: str, *, ended: Sequence[EndedBox], failures: Sequence[str], hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.ended = tuple(ended)
        self.failures = tuple(failures)


def teardown(
    owner: Owner,
    namespace: str,
    clouds: Sequence[Cloud],
    *,
    journal: Journal,
    may_hold: Sequence[str] | None = None,
    sole_creator: bool = False,
    timeout_s: float = 600,
    clock: Clock = SYSTEM_CLOCK,
    listener: Listener = ignore,
) -> TeardownReport:
    """End every box of the owner's lease that was created before this call, and prove it.

    Nothing is needed from whoever rented the boxes: they are found by their name, in every state. Repeating
    it, also at the same time, does no harm.

    Args:
        owner: Whose lease.
        namespace: The installation.
        clouds: Where to look.
        journal: This machine's journal of the lease.
        may_hold: Clouds (``cloud@account``) that the request names, so that a create may have been sent
            there; joined with what the journal knows. None when nobody knows, and then every cloud counts.
        sole_creator: Whether every create of the lease was sent by this machine, so that its journal knows
            of all of them; otherwise one of another machine may be too young to be listed.
        timeout_s: How long to go on trying.
        clock: Time and sleep.
        listener: Told what happens.

    Returns:
        What was ended.

    Raises:
        TeardownFailed: When something is left, or a cloud where a create may have been sent cannot be asked;
            after everything has been tried.
    """
    lease = lease_id(owner, namespace)
    suspects = journal.clouds() | set(may_hold or ())
    search = partial(
        _clear_cloud,
        namespace=namespace,
        lease=lease,
        journal=journal,
        sole_creator=sole_creator,
        timeout_s=timeout_s,
        clock=clock,
        listener=listener,
    )
    outcomes = in_parallel([partial(search, cloud) for cloud in clouds])
    ended: list[EndedBox] = []
    failures: list[str] = []
    not_asked: list[str] = []
    for cloud, outcome in zip(clouds, outcomes, strict=True):
        if isinstance(outcome, Exception):
            raise outcome
        ended += outcome.ended
        if outcome.unlisted is not None and suspects and ref_of(cloud) not in suspects:
            not_asked.append(f"{ref_of(cloud)}: {outcome.unlisted}")
        elif outcome.unlisted is not None:
            failures.append(f"{ref_of(cloud)} cannot be asked: {outcome.unlisted}")
        failures += outcome.left
    # A cloud that the journal names and that nobody opened cannot be proven empty.
    failures += [f"{ref} was not looked at" for ref in sorted(suspects - {ref_of(cloud) for cloud in clouds})]
    if failures:
        raise TeardownFailed(
            f"not everything of {owner} is proven to be gone: {'; '.join(failures)}",
            ended=ended,
            failures=failures,
            hint="run the teardown again; boxes that are left end by their dead-man at the deadline in their name",
        )
    return TeardownReport(owner=owner, lease=lease, ended=tuple(ended), not_asked=tuple(not_asked))


@dataclass(slots=True)
class _Cleared:
    ended: list[EndedBox]
    left: list[str]
    unlisted: str | None


def _clear_cloud(
    cloud: Cloud,
    *,
    namespace: str,
    lease: str,
    journal: Journal,
    sole_creator: bool,
    timeout_s: float,
    clock: Clock,
    listener: Listener,
) -> _Cleared:
    """End what one cloud lists of the lease, until it has listed nothing for as long as it may lag."""
    until = clock.monotonic() + timeout_s
    began = cloud_now(cloud, clock)
    open_until = clock.monotonic() + _open_intents_s(cloud, journal, clock.now())
    elsewhere_until = clock.monotonic() + _elsewhere_s(cloud, journal, sole_creator=sole_creator)
    # What this machine created is ended by its id, even if the listing does not show it yet.
    known = [box for ref, box in journal.live_boxes() if ref == ref_of(cloud)]
    cleared = _Cleared(ended=[], left=[], unlisted=None)
    while True:
        try:
            listed = cloud.find(lease_prefix(namespace, lease))
            suspects = suspected_boxes(cloud, journal)
        except CloudError as error:
            if isinstance(error, AuthenticationFailed) or clock.monotonic() >= until:
                cleared.unlisted = str(error)
                return cleared
            clock.sleep(max(POLL_S, error.retry_after_s or 0.0))
            continue
        gone = {box.id for box in cleared.ended}
        unlisted = [box for box in known if box.id not in gone | {box.id for box in listed}]
        found = _older_than([*listed, *unlisted], namespace, lease, began)
        # Another machine's create was old enough to be listed, if a box of it has been.
        quiet_until = open_until if cleared.ended else max(open_until, elsewhere_until)
        if not found and clock.monotonic() >= quiet_until:
            cleared.left = [f"{described(cloud, suspects)}; {_LOOK_AT_THEM}"] if suspects else []
            if not suspects:
                settle(cloud, journal)
            return cleared
        cleared.left = []
        left_s = max(0.0, until - clock.monotonic())
        for outcome in in_parallel(
            [
                partial(
                    end_box, cloud, box, clock=clock, timeout_s=left_s, journal=journal, listener=listener
                )
                for box in found
            ]
        ):
            if isinstance(outcome, NotProvenGone):
                cleared.left.append(str(outcome))
            elif isinstance(outcome, Exception):
                raise outcome
            else:
                # A listing that lags behind may show a box once more that was already proven gone.
                cleared.ended += [outcome] if outcome.id not in gone else []
        if clock.monotonic() >= until:
            if not found:
                unlisted_s = quiet_until - clock.monotonic()
                cleared.left = [
                    f"{ref_of(cloud)} may list a box of a late create for {unlisted_s:.0f} s more"
                ]
            return cleared
        clock.sleep(min(POLL_S, max(0.05, quiet_until - clock.monotonic())) if not found else 0.0)


def _older_than(found: Sequence[Box], namespace: str, lease: str, began: datetime) -> list[Box]:
    return [
        box
        for name, box in boxes_of(found, namespace, lease)
        if name.created <= began + CREATED_AFTER_TOLERANCE and box.state is not BoxState.GONE
    ]


def _open_intents_s(cloud: Cloud, journal: Journal, now: datetime) -> float:
    """Return how long a create of this machine, of which nobody knows how it ended, may stay unlisted."""
    lag_s = cloud.capabilities.lag_s
    sent = [entry for entry in journal.unsettled() if entry["cloud"] == ref_of(cloud)]
    ages_s = [(now - datetime.fromisoformat(entry["at"])).total_seconds() for entry in sent]
    return max([0.0, *(lag_s - age_s for age_s in ages_s)])


def _elsewhere_s(cloud: Cloud, journal: Journal, *, sole_creator: bool) -> float:
    """Return how long a create of another machine, sent a moment ago, may stay unlisted."""
    known = sole_creator or any(entry["cloud"] == ref_of(cloud) for entry in journal.intents())
    return 0.0 if known else cloud.capabilities.lag_s
