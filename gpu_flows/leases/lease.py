"""Who answers for a box, and the name that the box therefore carries.

A lease is computed, not stored: anyone who knows the owner and the namespace can name every box of it, so
a retry finds its box and a teardown needs nothing from the task that rented it.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from base64 import b32encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from gpu_flows.clouds.base import Box
from gpu_flows.errors import BadRequest, GpuFlowsError
from gpu_flows.offers import Offer
from gpu_flows.settings import NAMESPACE

SCHEME = "gf1"
"""Version of the name scheme; teardown has to know every older one for ever."""

MAX_NODES = 100
TEARDOWN_SLACK = timedelta(minutes=15)
"""What a lease lasts beyond the wait for the box and the job: fetching outputs and tearing down."""

_LEASE_WIDTH, _NONCE_WIDTH, _TIME_WIDTH = 12, 8, 7
_NAME = re.compile(
    rf"{SCHEME}-(?P<namespace>[a-z0-9]{{1,16}})-(?P<lease>[a-z2-7]{{{_LEASE_WIDTH}}})-(?P<node>[0-9]{{2}})"
    rf"-(?P<created>[0-9a-z]{{{_TIME_WIDTH}}})-(?P<nonce>[a-z2-7]{{{_NONCE_WIDTH}}})"
    rf"-(?P<deadline>[0-9a-z]{{{_TIME_WIDTH}}})"
)
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


class LeaseConflict(GpuFlowsError):
    """Boxes of this lease exist that cannot serve the request."""

    code = "LEASE_CONFLICT"


@dataclass(frozen=True, slots=True)
class Owner:
    """Who answers for the boxes of a lease; clears and retries keep it.

    Attributes:
        parts: ``("airflow", dag_id, run_id, task_id, map_index)``, ``("prefect", flow_run_id, name, key)`` or
            ``("cli", name)``.
    """

    parts: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.parts or not all(isinstance(part, str) and part for part in self.parts):
            raise BadRequest(f"an owner is a list of non-empty strings, not {list(self.parts)!r}")

    @classmethod
    def parse(cls, text: str) -> Owner:
        """Read an owner from its JSON list, or a bare name as an owner of the command line.

        Raises:
            BadRequest: When it looks like JSON but is no list of strings.
        """
        if not text.lstrip().startswith("["):
            return cls(("cli", text.strip()))
        try:
            parts = json.loads(text)
        except json.JSONDecodeError as error:
            raise BadRequest(f"the owner {text!r} is no JSON list: {error}") from error
        if not isinstance(parts, list):
            raise BadRequest(f"the owner {text!r} is no JSON list")
        return cls(tuple(parts))

    def __str__(self) -> str:
        return json.dumps(self.parts, ensure_ascii=False, separators=(",", ":"))


def check_namespace(namespace: str) -> str:
    """Return the namespace, or say why it is none.

    Raises:
        BadRequest: When it is not one to sixteen characters of ``[a-z0-9]``.
    """
    if not NAMESPACE.fullmatch(namespace):
        raise BadRequest(f"the namespace {namespace!r} is not 1 to 16 characters of a-z and 0-9")
    return namespace


def lease_id(owner: Owner, namespace: str) -> str:
    """Return the 12 characters (60 bits) that stand for this owner in this namespace."""
    text = json.dumps([check_namespace(namespace), *owner.parts], ensure_ascii=False, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).digest()
    return b32encode(digest).decode().lower()[:_LEASE_WIDTH]


def new_nonce() -> str:
    """Return eight random characters that mark one create call."""
    return b32encode(secrets.token_bytes(5)).decode().lower()[:_NONCE_WIDTH]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxName:
    """The parts of a box's name, all that has to be known about it at a glance.

    Attributes:
        namespace: The installation.
        lease: The lease id.
        node: Index of the node within the lease.
        created: When its create call was made, to the second, aware.
        nonce: Marks that create call.
        deadline: When the box must be gone, to the second, aware.
    """

    namespace: str
    lease: str
    node: int
    created: datetime
    nonce: str
    deadline: datetime

    def __str__(self) -> str:
        return (
            f"{lease_prefix(self.namespace, self.lease)}{self.node:02d}-{_encode(self.created)}"
            f"-{self.nonce}-{_encode(self.deadline)}"
        )

    @classmethod
    def parse(cls, text: str) -> BoxName | None:
        """Return the parts of a name, or None when it is not exactly one of ours."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        try:
            created, deadline = _decode(match["created"]), _decode(match["deadline"])
        except (OverflowError, ValueError, OSError):
            return None
        return cls(
            namespace=match["namespace"],
            lease=match["lease"],
            node=int(match["node"]),
            created=created,
            nonce=match["nonce"],
            deadline=deadline,
        )


def namespace_prefix(namespace: str) -> str:
    """Return what every box name of an installation starts with; a pre-filter, never a proof."""
    return f"{SCHEME}-{namespace}-"


def lease_prefix(namespace: str, lease: str) -> str:
    """Return what every box name of a lease starts with; a pre-filter, never a proof."""
    return f"{namespace_prefix(namespace)}{lease}-"


def boxes_of(boxes: Sequence[Box], namespace: str, lease: str) -> list[tuple[BoxName, Box]]:
    """Return the boxes that carry exactly this lease, with their parsed names, oldest first."""
    return sorted(
        ((name, box) for name, box in boxes_of_namespace(boxes, namespace) if name.lease == lease),
        key=lambda pair: (pair[0].created, pair[0].nonce),
    )


def boxes_of_namespace(boxes: Sequence[Box], namespace: str) -> list[tuple[BoxName, Box]]:
    """Return the boxes that carry exactly this installation's names, with their parsed names."""
    named = [(name, box) for box in boxes if (name := BoxName.parse(box.name)) is not None]
    return [(name, box) for name, box in named if name.namespace == namespace]


def deadline_of(created: datetime, *, ready_timeout_s: float, max_duration: timedelta) -> datetime:
    """Return when a box must be gone: the wait for it, the job, and the slack of teardown.

    Args:
        created: When its create call is made, aware.
        ready_timeout_s: How long it may take to become ready.
        max_duration: How long the job may run.

    Returns:
        The deadline, aware; it is never extended.
    """
    return created + timedelta(seconds=ready_timeout_s) + max_duration + TEARDOWN_SLACK


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedBox:
    """One node of a lease: the box, and the offer that it was rented by.

    Attributes:
        node: Index within the lease.
        box: As the cloud last described it, its endpoint with the pinned host key.
        offer: What was promised; None for a box that was found and not rented by this attempt.
        created_at: When its create call was made, aware.
        ready_at: When it had answered SSH and passed its check, aware.
        facts: What the box said about itself when it was checked; plain JSON.
    """

    node: int
    box: Box
    offer: Offer | None = None
    created_at: datetime
    ready_at: datetime | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> BoxName:
        """The parsed name of the box."""
        name = BoxName.parse(self.box.name)
        if name is None:
            raise ValueError(f"a leased box carries no lease name: {self.box.name!r}")
        return name

    def to_json(self) -> dict[str, Any]:
        """Return the node as plain JSON values; it holds no secret."""
        return {
            "node": self.node,
            "box": self.box.to_json(),
            "offer": self.offer.to_json() if self.offer else None,
            "created_at": self.created_at.isoformat(),
            "ready_at": self.ready_at.isoformat() if self.ready_at else None,
            "facts": dict(self.facts),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LeasedBox:
        """Rebuild a node from what `to_json` returned."""
        return cls(
            node=data["node"],
            box=Box.from_json(data["box"]),
            offer=Offer.from_json(data["offer"]) if data["offer"] else None,
            created_at=datetime.fromisoformat(data["created_at"]),
            ready_at=datetime.fromisoformat(data["ready_at"]) if data["ready_at"] else None,
            facts=data["facts"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """What an owner holds: the handle that travels between steps as plain JSON.

    Attributes:
        owner: Who answers for it.
        namespace: The installation.
        clouds: Where boxes of it may exist, as ``cloud`` or ``cloud@account``.
        nodes: Number of boxes wanted.
        boxes: The boxes, by node; empty before provisioning.
    """

    owner: Owner
    namespace: str
    clouds: tuple[str, ...]
    nodes: int = 1
    boxes: tuple[LeasedBox, ...] = ()

    @property
    def id(self) -> str:
        """The lease id that every box name carries."""
        return lease_id(self.owner, self.namespace)

    @property
    def prefix(self) -> str:
        """What every box name of the lease starts with."""
        return lease_prefix(self.namespace, self.id)

    @property
    def deadline(self) -> datetime | None:
        """When the first of its boxes must be gone; None before provisioning."""
        return min((leased.name.deadline for leased in self.boxes), default=None)

    @property
    def usd_per_hour(self) -> float:
        """Dollars per hour for all of its boxes, as billed."""
        return sum(leased.box.usd_per_hour or 0.0 for leased in self.boxes)

    def with_boxes(self, boxes: Sequence[LeasedBox]) -> Lease:
        """Return the lease holding these boxes, in the order of their nodes."""
        return replace(self, boxes=tuple(sorted(boxes, key=lambda leased: leased.node)))

    def to_json(self) -> dict[str, Any]:
        """Return the handle as plain JSON values; it holds no secret."""
        return {
            "owner": list(self.owner.parts),
            "namespace": self.namespace,
            "lease": self.id,
            "clouds": list(self.clouds),
            "nodes": self.nodes,
            "boxes": [leased.to_json() for leased in self.boxes],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Lease:
        """Rebuild a handle from what `to_json` returned."""
        return cls(
            owner=Owner(tuple(data["owner"])),
            namespace=data["namespace"],
            clouds=tuple(data["clouds"]),
            nodes=data["nodes"],
            boxes=tuple(LeasedBox.from_json(item) for item in data["boxes"]),
        )


def _encode(moment: datetime) -> str:
    """Write a time as seconds since the epoch in base 36, fixed width (to the year 4453)."""
    seconds, text = int(moment.timestamp()), ""
    for _ in range(_TIME_WIDTH):
        seconds, digit = divmod(seconds, 36)
        text = _DIGITS[digit] + text
    return text


def _decode(text: str) -> datetime:
    return datetime.fromtimestamp(int(text, 36), UTC)
