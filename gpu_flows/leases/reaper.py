"""Ending what nobody wants any more: boxes past their deadline, and boxes whose owner has ended.

Accounts are shared. A box is ours only if its name is exactly one of this installation; what merely looks
like one is shown and never touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from gpu_flows.clock import SYSTEM_CLOCK, Clock
from gpu_flows.clouds.base import Box, BoxState, Cloud, ref_of
from gpu_flows.clouds.errors import CloudError
from gpu_flows.errors import BadRequest, GpuFlowsError
from gpu_flows.leases.ending import EndedBox, NotProvenGone, cloud_now, end_box
from gpu_flows.leases.journal import Journal
from gpu_flows.leases.lease import BoxName, Owner
from gpu_flows.leases.liveness import OwnerLiveness
from gpu_flows.leases.parallel import in_parallel
from gpu_flows.progress import Listener, ignore

LOOK_ALIKE_PREFIXES = ("gf", "gpu-flows", "gpu_flows", "gpuflows")
_SEARCH_PREFIX = "g"


class Standing(StrEnum):
    """What the reaper thinks of a box."""

    HELD = "held"
    """Ours, within its deadline, and not known to be unwanted."""
    EXPIRED = "expired"
    """Ours, past its deadline."""
    ORPHANED = "orphaned"
    """Ours, and its owner is known to have ended."""
    OTHER = "other"
    """Another installation's: never touched."""
    LOOK_ALIKE = "look-alike"
    """Not named by this package, although it nearly looks so: never touched."""
    UNNAMED = "unnamed"
    """Without any name, on a cloud where names come after the create: perhaps ours, and never touched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """One box that was seen.

    Attributes:
        cloud: ``cloud`` or ``cloud@account``.
        box: The box.
        name: The parts of its name; None for a look-alike.
        owner: Whose it is, where that is known.
        standing: What the reaper thinks of it.
        seen_at: When, by the cloud's clock.
    """

    cloud: str
    box: Box
    name: BoxName | None
    owner: Owner | None
    standing: Standing
    seen_at: datetime

    @property
    def usd_so_far(self) -> float | None:
        """Dollars billed until it was seen; None when the cloud does not tell the price."""
        began = self.box.created_at or (self.name.created if self.name else None)
        if self.box.usd_per_hour is None or began is None:
            return None
        return self.box.usd_per_hour * max(0.0, (self.seen_at - began).total_seconds()) / 3600

    def to_json(self) -> dict[str, Any]:
        """Return the sighting as plain JSON values."""
        return {
            "cloud": self.cloud,
            "id": self.box.id,
            "name": self.box.name,
            "state": self.box.state.value,
            "standing": self.standing.value,
            "owner": list(self.owner.parts) if self.owner else None,
            "lease": self.name.lease if self.name else None,
            "node": self.name.node if self.name else None,
            "gpu": self.box.gpu,
            "gpu_count": self.box.gpu_count,
            "region": self.box.region,
            "usd_per_hour": self.box.usd_per_hour,
            "usd_so_far": self.usd_so_far,
            "created_at": self.name.created.isoformat() if self.name else None,
            "deadline": self.name.deadline.isoformat() if self.name else None,
        }


@dataclass(frozen=True, slots=True)
class Survey:
    """What a look at several clouds showed.

    Attributes:
        sightings: Boxes of this package's kind, oldest first.
        unknown: Clouds that could not be asked, with the reason: they may hold anything.
    """

    sightings: tuple[Sighting, ...]
    unknown: tuple[str, ...]


class ReapFailed(GpuFlowsError):
    """Something may go on billing.

    Args:
        message: What, and why.
        ended: What could be ended all the same.
    """

    code = "REAP_FAILED"

    def __init__(self, message: str, *, ended: Sequence[EndedBox]) -> None:
        super().__init__(message, hint="mend the access to the cloud that is named, and reap again")
        self.ended = tuple(ended)


def standing_of(name: str, namespace: str, now: datetime, *, wanted: bool | None) -> Standing | None:
    """Judge a box by its name.

    Args:
        name: The whole name that it carries.
        namespace: This installation.
        now: The time by the cloud's clock, aware.
        wanted: Whether its owner still wants it; None when nobody here knows.

    Returns:
        What to think of it; None for a box that has nothing to do with this package.
    """
    parsed = BoxName.parse(name)
    if parsed is None:
        return Standing.LOOK_ALIKE if name.lower().startswith(LOOK_ALIKE_PREFIXES) else None
    if parsed.namespace != namespace:
        return Standing.OTHER
    if parsed.deadline <= now:
        return Standing.EXPIRED
    # An owner that nobody here knows is never taken for ended.
    return Standing.ORPHANED if wanted is False else Standing.HELD


def survey(
    clouds: Sequence[Cloud],
    namespace: str,
    *,
    journals: Path | None = None,
    liveness: OwnerLiveness | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Survey:
    """Look at every cloud for boxes of this package's kind; change nothing.

    Args:
        clouds: Where to look.
        namespace: This installation.
        journals: Folder of this machine's journals, which may know the owners.
        liveness: Knows whether owners still want their boxes.
        clock: Time.

    Returns:
        What was seen, and which clouds could not be asked.
    """
    outcomes = in_parallel(
        [partial(cloud.find, _search_prefix(cloud)) for cloud in clouds], interruptible=True
    )
    seen: list[Sighting] = []
    unknown: list[str] = []
    for cloud, outcome in zip(clouds, outcomes, strict=True):
        if isinstance(outcome, CloudError):
            unknown.append(f"{ref_of(cloud)}: {outcome}")
        elif isinstance(outcome, Exception):
            raise outcome
        else:
            now = cloud_now(cloud, clock)
            looked = (_look(cloud, box, namespace, now, journals, liveness) for box in outcome)
            seen += [sighting for sighting in looked if sighting is not None]
    seen.sort(key=lambda s: (s.name.created if s.name else s.seen_at, s.box.name, s.box.id))
    return Survey(tuple(seen), tuple(unknown))


def reap(
    found: Survey,
    clouds: Sequence[Cloud],
    *,
    journals: Path,
    timeout_s: float = 600,
    clock: Clock = SYSTEM_CLOCK,
    listener: Listener = ignore,
) -> list[EndedBox]:
    """End the boxes of a survey that are expired or orphaned.

    Args:
        found: What `survey` showed.
        clouds: The same clouds.
        journals: Folder of this machine's journals.
        timeout_s: How long to go on trying, for each box.
        clock: Time and sleep.
        listener: Told what happens.

    Returns:
        What was ended, proven.

    Raises:
        ReapFailed: When a box is left or a cloud could not be asked; after everything has been tried.
    """
    by_ref = {ref_of(cloud): cloud for cloud in clouds}
    due = [s for s in found.sightings if s.standing in (Standing.EXPIRED, Standing.ORPHANED)]
    calls = []
    for sighting in due:
        if sighting.name is None:
            raise BadRequest(f"{sighting.box.name} is none of ours and must not be reaped")
        journal = Journal(journals, sighting.name.namespace, sighting.name.lease)
        calls.append(
            partial(
                end_box,
                by_ref[sighting.cloud],
                sighting.box,
                clock=clock,
                timeout_s=timeout_s,
                journal=journal if journal.path.exists() else None,
                listener=listener,
            )
        )
    ended: list[EndedBox] = []
    problems: list[str] = [f"cannot be asked: {reason}" for reason in found.unknown]
    for outcome in in_parallel(calls):
        if isinstance(outcome, NotProvenGone):
            problems.append(str(outcome))
        elif isinstance(outcome, Exception):
            raise outcome
        else:
            ended.append(outcome)
    if problems:
        raise ReapFailed(f"the reaper cannot prove that all is well: {'; '.join(problems)}", ended=ended)
    return ended


def _look(
    cloud: Cloud,
    box: Box,
    namespace: str,
    now: datetime,
    journals: Path | None,
    liveness: OwnerLiveness | None,
) -> Sighting | None:
    name = BoxName.parse(box.name)
    owner: Owner | None = None
    wanted: bool | None = None
    if name is not None and name.namespace == namespace:
        owner = _owner_of(box, name, journals)
        wanted = liveness.wants(owner, namespace, name.lease) if liveness else None
    standing = standing_of(box.name, namespace, now, wanted=wanted)
    if not box.name and not cloud.capabilities.names_at_create:
        standing = Standing.UNNAMED
    if standing is None or box.state is BoxState.GONE:
        return None
    return Sighting(cloud=ref_of(cloud), box=box, name=name, owner=owner, standing=standing, seen_at=now)


def _search_prefix(cloud: Cloud) -> str:
    return _SEARCH_PREFIX if cloud.capabilities.names_at_create else ""


def _owner_of(box: Box, name: BoxName, journals: Path | None) -> Owner | None:
    """Return the owner that rides along with the box, else the one that this machine remembers."""
    told = box.details.get("owner")
    if isinstance(told, str) and told:
        try:
            return Owner.parse(told)
        except BadRequest:
            # Anyone with access to the account can write there: an odd text only means "not known".
            return None
    parts = Journal(journals, name.namespace, name.lease).owner() if journals else None
    return Owner(parts) if parts else None
