"""What the machine that rented remembers of a lease: what was promised, and the pinned host keys of its boxes."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_flows.gpus.request import GpuRequest
from gpu_flows.leases.lease import Lease, Owner, lease_id
from gpu_flows.offers import Offer
from gpu_flows.progress import Progress
from gpu_flows.runs.installation import Installation

_HANDLE = "lease.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """What the machine that rented remembers of a lease.

    Attributes:
        lease: The lease with its boxes, their host keys pinned.
        request: What was asked for.
    """

    lease: Lease
    request: GpuRequest

    @property
    def pins(self) -> dict[str, str]:
        """The host key of each box, by its id."""
        boxes = [leased.box for leased in self.lease.boxes]
        return {box.id: box.endpoint.host_key for box in boxes if box.endpoint and box.endpoint.host_key}


def remember(lease: Lease, request: GpuRequest, installation: Installation) -> Path:
    """Keep the handle of a lease for later processes of this machine; it holds no secret.

    Args:
        lease: The lease with its boxes.
        request: What was asked for.
        installation: Whose folder.

    Returns:
        The file.
    """
    before = remembered(lease.owner, lease.namespace, installation)
    # A box that was found and not rented just now was promised something when it was.
    promised = {leased.box.id: leased.offer for leased in before.lease.boxes} if before else {}
    lease = lease.with_boxes(
        [replace(leased, offer=leased.offer or promised.get(leased.box.id)) for leased in lease.boxes]
    )
    path = installation.run_folder(lease.id) / _HANDLE
    fresh = path.with_name(f".{_HANDLE}.{os.getpid()}")
    text = json.dumps({"lease": lease.to_json(), "request": request.to_json()})
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)
    return path


def asked_for(request: GpuRequest, offer: Offer | None) -> tuple[int, int]:
    """Return how many GPUs, and how many processor cores, a request wants of one box.

    Args:
        request: What was asked for.
        offer: The offer that was taken; None when nobody knows, and then the first alternative counts.
    """
    if offer is not None and offer.gpu is not None:
        return offer.used_count or offer.gpu_count, 0
    index = offer.alternative if offer is not None else 0
    asked = request.alternatives[min(index, len(request.alternatives) - 1)]
    return (0, asked.count) if asked.is_cpu else (asked.count, 0)


def remembered(owner: Owner, namespace: str, installation: Installation) -> Handle | None:
    """Return what this machine remembers of an owner's lease; None when it did not rent it."""
    path = installation.settings.logs / lease_id(owner, namespace) / _HANDLE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Handle(lease=Lease.from_json(data["lease"]), request=GpuRequest.from_json(data["request"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        # Without it the boxes are found all the same, as on another machine.
        message = f"{path} cannot be read, so host keys are not compared: {error}"
        installation.listener(Progress("lookup", "handle.unreadable", message))
        return None
