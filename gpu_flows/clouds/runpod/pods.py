"""What is asked of a pod, and what the answers about it mean.

Source: the specification of REST v2 (``CreatePodRequest``, ``Pod``, ``PodStatus``) and docs.runpod.io.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from gpu_flows.clouds.base import Box, BoxSpec, BoxState
from gpu_flows.clouds.errors import RequestRefused, UnexpectedAnswer
from gpu_flows.clouds.runpod.boot import container_args
from gpu_flows.clouds.runpod.prices import (
    CLOUD,
    DEFAULT_DISK_GB,
    DISK_USD_PER_GB_MONTH,
    STOPPED_VOLUME_USD_PER_GB_MONTH,
    TIERS,
    hourly,
    shape,
)
from gpu_flows.endpoint import SshEndpoint
from gpu_flows.gpus.catalog import from_cloud_id
from gpu_flows.offers import Offer

IMAGES = {
    "12.8": "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404",
    "13.0": "runpod/pytorch:1.0.7-cu1300-torch291-ubuntu2404",
    "rocm": "runpod/pytorch:2.4.0-py3.10-rocm6.1.0-ubuntu22.04",
}
"""RunPod's own images with torch and sshd, by what they are built for."""

_MOST_VARIABLES = 50
_LONGEST_NAME = 191
_RESERVED = re.compile(r"PUBLIC_KEY|RUNPOD_\w+|GPU_FLOWS_\w+")
_CUDA_IN_IMAGE = re.compile(r"cu(?:da)?[:-]?(\d\d)\.?(\d)")

_STATES = {
    "PROVISIONING": BoxState.STARTING,
    "STARTING": BoxState.STARTING,
    "RUNNING": BoxState.RUNNING,
    "EXITED": BoxState.STOPPED,
    "ERROR": BoxState.FAILED,
    "TERMINATED": BoxState.GONE,
}


def create_request(offer: Offer, spec: BoxSpec) -> dict[str, Any]:
    """Return the body of a create call.

    The tier is pinned: it decides the price (C19). ``dataCenterIds`` is a preference to RunPod, see `differs`.

    Args:
        offer: One of RunPod's.
        spec: What the pod carries.

    Raises:
        RequestRefused: For what RunPod would refuse, or would silently do otherwise.
    """
    gpu, tier = offer.details.get("gpu"), offer.details.get("tier")
    if (
        offer.cloud != CLOUD
        or tier not in TIERS
        or offer.instance_type != shape(str(gpu), offer.gpu_count, tier)
    ):
        raise RequestRefused(f"not an offer of runpod: {offer.cloud} {offer.instance_type}")
    if not 1 <= len(spec.name) <= _LONGEST_NAME:
        raise RequestRefused(f"a pod's name has 1 to {_LONGEST_NAME} characters: {spec.name!r}")
    if taken := sorted(filter(_RESERVED.fullmatch, spec.env)):
        raise RequestRefused(f"the variables {', '.join(taken)} of a pod are not the user's to set")
    env = {**spec.env, "PUBLIC_KEY": spec.ssh_public_key.strip(), "GPU_FLOWS_OWNER": spec.owner}
    if len(env) > _MOST_VARIABLES:
        raise RequestRefused(f"a pod has at most {_MOST_VARIABLES} variables, not {len(env)}")
    image, min_cuda = image_of(str(gpu), spec.image)
    card = {"id": gpu, "count": offer.gpu_count}
    return {
        "name": spec.name,
        "image": image,
        "gpu": {**card, "minCudaVersion": min_cuda} if min_cuda else card,
        "cloud": tier,
        **({"dataCenterIds": [offer.region]} if offer.region else {}),
        "disk": spec.disk_gb or DEFAULT_DISK_GB,
        "ports": ["22/tcp"],
        # Adds the account's own keys only where the request has none, which it has.
        "startSsh": True,
        "env": env,
        **({"args": container_args(spec.boot_script)} if spec.boot_script else {}),
    }


def image_of(gpu: str, image: str | None) -> tuple[str, str | None]:
    """Return the image to boot, and the oldest CUDA that its host must have.

    A host whose driver is too old for the image keeps the pod RUNNING, never ready, and bills it.

    Args:
        gpu: RunPod's id of the card.
        image: What the user wants; None for RunPod's own image with torch.
    """
    variant = from_cloud_id(CLOUD, gpu)
    if variant is not None and variant.model.architecture == "rocm":
        return image or IMAGES["rocm"], None
    of_card = variant.model.min_cuda if variant is not None else None
    if image is None:
        newest = of_card is not None and _version(of_card) >= _version("13.0")
        image = IMAGES["13.0" if newest else "12.8"]
    found = _CUDA_IN_IMAGE.search(image)
    of_image = f"{found[1]}.{found[2]}" if found else None
    return image, max(filter(None, (of_card, of_image)), key=_version, default=None)


def rows_of(body: Any) -> list[Mapping[str, Any]]:
    """Return the pods of a listing.

    Raises:
        UnexpectedAnswer: When it is not one (C05): it must not be taken for an empty one.
    """
    rows = body.get("pods") if isinstance(body, dict) else None
    if rows is None:
        raise UnexpectedAnswer(f"runpod answered GET /v2/pods with no listing of pods: {str(body)[:200]}")
    # What is shown of a pod could be somebody's secret: its environment is part of the answer.
    if not isinstance(rows, list) or not all(isinstance(row, dict) and _named(row) for row in rows):
        raise UnexpectedAnswer("runpod answered GET /v2/pods with something among the pods that is none")
    return rows


def box_of(row: Any, account: str) -> Box:
    """Return a pod as a box.

    Args:
        row: One pod of an answer.
        account: Whose it is.

    Raises:
        UnexpectedAnswer: When it is no pod; its id is in ``box_ids`` where it has one.
    """
    try:
        status, card = row["status"], row.get("gpu") or {}
        variant = from_cloud_id(CLOUD, card["id"]) if card else None
        state, reason = _state(status, row)
        return Box(
            cloud=CLOUD,
            account=account,
            region=row.get("dataCenterId") or "",
            id=_id(row),
            name=row["name"],
            state=state,
            state_reason=reason,
            usd_per_hour=_usd_per_hour(row),
            endpoint=_endpoint(row) if state is BoxState.RUNNING else None,
            gpu=variant.name if variant else card.get("id"),
            gpu_count=int(card.get("count", 1)) if card else 0,
            created_at=datetime.fromisoformat(row["createdAt"]),
            details={"tier": row["cloud"], "gpu": card.get("id"), "image": row.get("image")},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnexpectedAnswer(
            f"runpod answered with no pod: {type(error).__name__}: {error}",
            box_ids=[row["id"]] if isinstance(row, dict) and _named(row) else (),
        ) from error


def differs(box: Box, offer: Offer) -> str | None:
    """Return what a pod was not made as, or None: a tier is a price, and a data centre may be the law."""
    asked = {"tier": offer.details["tier"], "gpu": offer.details["gpu"]}
    found = [
        f"{what} {box.details[what]} and not {wanted}"
        for what, wanted in asked.items()
        if box.details[what] != wanted
    ]
    if box.gpu_count != offer.gpu_count:
        found.append(f"{box.gpu_count} GPUs and not {offer.gpu_count}")
    if offer.details["region_is_law"] and box.region not in ("", offer.region):
        found.append(f"data centre {box.region} and not {offer.region}")
    return ", ".join(found) or None


def _named(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("id"), str) and bool(row["id"]) and isinstance(row.get("name"), str)


def _id(row: Mapping[str, Any]) -> str:
    if not _named(row):
        raise ValueError("it has no id or no name")
    return str(row["id"])


def _state(status: str, row: Mapping[str, Any]) -> tuple[BoxState, str]:
    if status not in _STATES:
        # Whatever it is, it may bill and may serve: it is waited for until its deadline, found and destroyed.
        return BoxState.STARTING, f"RunPod calls it {status}, which is not a published status"
    if status == "RUNNING" and _endpoint(row) is None:
        return BoxState.STARTING, "RUNNING, and its SSH port has no public address yet"
    if status == "ERROR":
        return BoxState.FAILED, "RunPod says ERROR: its container cannot recover"
    return _STATES[status], ""


def _endpoint(row: Mapping[str, Any]) -> SshEndpoint | None:
    direct = row["ssh"]["direct"]
    if direct is None:
        return None
    return SshEndpoint(host=direct["host"], port=int(direct["port"]), username=direct["username"])


def _usd_per_hour(row: Mapping[str, Any]) -> float | None:
    """Return what a pod costs with its disks; ``cost`` is that of its GPUs, and 0 while it is stopped."""
    cost = float(row["cost"])
    volume = ((row.get("mounts") or {}).get("persistent") or {}).get("size", 0)
    if cost > 0:
        return round(cost + hourly(DISK_USD_PER_GB_MONTH, float(row["disk"]) + volume), 6)
    return round(hourly(STOPPED_VOLUME_USD_PER_GB_MONTH, volume), 6) or None


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))
