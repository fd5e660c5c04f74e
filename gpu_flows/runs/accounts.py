"""Would a run get through? Asked of every account beforehand, spending nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpu_flows.clouds.base import ref_of
from gpu_flows.clouds.errors import CloudError
from gpu_flows.errors import GpuFlowsError
from gpu_flows.leases.lease import boxes_of_namespace
from gpu_flows.leases.parallel import in_parallel
from gpu_flows.leases.provision import MAX_CLOCK_SKEW_S
from gpu_flows.runs.installation import Installation


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountCheck:
    """What one account would say to a run.

    Attributes:
        ref: ``cloud`` or ``cloud@account``.
        works: Whether its credentials do, and its boxes can be listed.
        boxes: Boxes of this installation that it holds now; None when it cannot be asked.
        stops: What would stop every run there, a sentence each.
        advice: What a person should know before renting there, a sentence each.
    """

    ref: str
    works: bool
    boxes: int | None
    stops: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether a run would get through."""
        return self.works and not self.stops

    def to_json(self) -> dict[str, Any]:
        """Return the findings as plain JSON values."""
        return {
            "cloud": self.ref,
            "ok": self.ok,
            "works": self.works,
            "boxes": self.boxes,
            "stops": list(self.stops),
            "advice": list(self.advice),
        }


def check_accounts(refs: Sequence[str], installation: Installation) -> list[AccountCheck]:
    """Ask accounts, all at once, whether a run would get through.

    Args:
        refs: Which, as ``cloud`` or ``cloud@account``.
        installation: Whose settings and credentials.

    Raises:
        BadRequest: When there is no such cloud, or the settings do not allow it.
    """
    for ref in refs:
        installation.cloud(ref)
    outcomes = in_parallel([partial(_check, ref, installation) for ref in refs], interruptible=True)
    found: list[AccountCheck] = []
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
        found.append(outcome)
    return found


def _check(ref: str, here: Installation) -> AccountCheck:
    cloud = here.cloud(ref)
    stops: list[str] = []
    advice: list[str] = []
    namespace = ""
    try:
        namespace = here.namespace([ref])
        here.identity(cloud, namespace)
    except GpuFlowsError as error:
        stops.append(str(error))
    boxes: int | None = None
    try:
        boxes = len(boxes_of_namespace(cloud.find("gf"), namespace))
    except CloudError as error:
        if str(error) not in stops:
            stops.append(str(error))
    skew_s = cloud.clock_skew_s() or 0.0
    if abs(skew_s) > MAX_CLOCK_SKEW_S:
        stops.append(f"this machine's clock is {abs(skew_s):.0f} s away from the cloud's: synchronise it")
    abilities = cloud.capabilities
    if not (abilities.self_destruct or abilities.native_timer):
        advice.append("a box cannot end its own billing: run the reaper on a schedule, and allow_unreaped")
    if not abilities.multi_node:
        advice.append("boxes cannot reach each other: one node a run")
    return AccountCheck(
        ref=ref_of(cloud), works=boxes is not None, boxes=boxes, stops=tuple(stops), advice=tuple(advice)
    )
