"""Finding the boxes of an owner again, from another process or another machine than the one that rented them.

The cloud says which boxes there are; what only the renting process learnt is in its handle, where that is at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from gpu_flows.clouds.base import Box, ref_of
from gpu_flows.clouds.errors import CloudError
from gpu_flows.errors import BadRequest, GpuFlowsError
from gpu_flows.leases.lease import BoxName, Lease, LeasedBox, Owner, boxes_of, lease_id, lease_prefix
from gpu_flows.leases.parallel import in_parallel
from gpu_flows.leases.provision import BoxCheck
from gpu_flows.leases.readiness import wait_until_ready
from gpu_flows.runs.check import SshCheck
from gpu_flows.runs.handle import remembered
from gpu_flows.runs.installation import Installation
from gpu_flows.runs.steps import owner_of


class NoBoxes(BadRequest):
    """The owner does not hold the boxes that it needs."""

    code = "NO_BOXES"


class BoxesUnknown(GpuFlowsError):
    """A cloud that may hold boxes of the owner cannot be asked."""

    code = "BOXES_UNKNOWN"


def find_lease(
    owner: str | Sequence[str] | Owner,
    installation: Installation,
    *,
    clouds: Sequence[str] | None = None,
    needs_pins: bool = False,
    inspects: bool = True,
    timeout_s: float = 120,
) -> Lease:
    """Find the boxes that an owner holds, reach them over SSH, and check them.

    Args:
        owner: Whose boxes.
        installation: Whose clouds and keys.
        clouds: Where to look; what this machine's journal knows unless given, else every configured cloud.
        needs_pins: Refuse boxes whose host keys nobody here knows: secrets are to be sent.
        inspects: Compare the boxes with their promise; else they only have to be reached.
        timeout_s: How long to wait for a box that is still starting.

    Returns:
        The lease with all of its boxes, ready, and their host keys pinned.

    Raises:
        NoBoxes: When it holds none, or only some of its nodes are left.
        NotPinned: When a host key is needed and not known.
        BoxesUnknown: When a cloud that may hold them cannot be asked.
        CloudError: When a box cannot be reached, or is not what it was.
    """
    who = owner_of(owner)
    namespace = installation.namespace(list(clouds or ()) or installation.configured_clouds())
    known = installation.journal(who, namespace).clouds()
    refs = list(dict.fromkeys([*(clouds or ()), *sorted(known)])) or installation.configured_clouds()
    handle = remembered(who, namespace, installation)
    found, unlisted = _listed(who, namespace, refs, installation)
    if not found and unlisted:
        raise BoxesUnknown(f"nobody can say what {who} holds: {'; '.join(unlisted)}")
    nodes = max([handle.lease.nodes if handle else 1, *(name.node + 1 for name, _ in found)])
    missing = sorted(set(range(nodes)) - {name.node for name, _ in found})
    if not found or missing:
        raise NoBoxes(
            f"{who} holds no boxes"
            if not found
            else f"{who} holds {len(found)} of {nodes} boxes: node {', '.join(map(str, missing))} is gone",
            hint="provision them first" if not found else "tear it down and provision it again",
        )
    lease = Lease(owner=who, namespace=namespace, clouds=tuple(refs), nodes=nodes)
    offers = {leased.box.id: leased.offer for leased in handle.lease.boxes} if handle else {}
    check = SshCheck(
        installation,
        namespace,
        pins=handle.pins if handle else None,
        needs_pins=needs_pins,
        inspects=inspects,
    )
    leased = [
        LeasedBox(node=name.node, box=box, offer=offers.get(box.id), created_at=name.created)
        for name, box in found
    ]
    ready = in_parallel(
        [partial(_ready, each, check, installation, timeout_s) for each in leased], interruptible=True
    )
    for outcome in ready:
        if isinstance(outcome, Exception):
            raise outcome
    return lease.with_boxes([each for each in ready if isinstance(each, LeasedBox)])


def _listed(
    who: Owner, namespace: str, refs: Sequence[str], here: Installation
) -> tuple[list[tuple[BoxName, Box]], list[str]]:
    """Return the box of each node that serves, and the clouds that could not be asked."""
    lease = lease_id(who, namespace)
    clouds = here.clouds(refs)
    outcomes = in_parallel(
        [partial(cloud.find, lease_prefix(namespace, lease)) for cloud in clouds], interruptible=True
    )
    by_node: dict[int, tuple[BoxName, Box]] = {}
    unlisted: list[str] = []
    for cloud, outcome in zip(clouds, outcomes, strict=True):
        if isinstance(outcome, CloudError):
            unlisted.append(f"{ref_of(cloud)} cannot be asked: {outcome}")
        elif isinstance(outcome, Exception):
            raise outcome
        else:
            for name, box in boxes_of(outcome, namespace, lease):
                if box.state.may_serve:
                    # Oldest first: of two boxes for one node the older one stays.
                    by_node.setdefault(name.node, (name, box))
    return [by_node[node] for node in sorted(by_node)], unlisted


def _ready(leased: LeasedBox, check: BoxCheck, here: Installation, timeout_s: float) -> LeasedBox:
    return wait_until_ready(
        here.cloud(leased.box.ref), leased, check=check, price_cap=None, timeout_s=timeout_s, clock=here.clock
    )
