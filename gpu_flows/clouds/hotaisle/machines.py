"""From Hot Aisle's own words to offers and boxes, and the note that a machine carries: pure functions.

Source: the API's published specification. Prices are in US cents per hour for the whole machine; nothing but the
description of a machine is ours to write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from gpu_flows.clouds.base import Box, BoxState
from gpu_flows.clouds.errors import UnexpectedAnswer
from gpu_flows.endpoint import SshEndpoint
from gpu_flows.gpus.catalog import from_cloud_id, nominal_vram_gb
from gpu_flows.offers import Offer

CLOUD = "hotaisle"
USERNAME = "hotaisle"
"""The login of every machine; it may use sudo."""

BILLING_STEP_S = 60
"""Hot Aisle's price list says that machines are billed by the minute; the API does not say."""

_LONGEST_NOTE = 1000

# The words are libvirt's. Whatever is off goes on being billed until it is deleted.
_STATES = {
    "running": BoxState.RUNNING,
    "idle": BoxState.RUNNING,
    "blocked": BoxState.RUNNING,
    "paused": BoxState.STOPPED,
    "pmsuspended": BoxState.STOPPED,
    "inshutdown": BoxState.STOPPED,
    "shutoff": BoxState.STOPPED,
    "crashed": BoxState.FAILED,
}


def shape_of(specs: Any) -> str:
    """Return our name for a kind of machine; Hot Aisle gives it none.

    Raises:
        UnexpectedAnswer: When the specs are none.
    """
    gpu, count = cards_of(specs)
    try:
        return f"{count}x{gpu}-{int(specs['cpu_cores'])}cpu-{int(specs['ram_capacity']) >> 30}gb"
    except (KeyError, TypeError, ValueError) as error:
        raise UnexpectedAnswer(f"hotaisle gave specs that are none: {str(specs)[:200]}") from error


def cards_of(specs: Any) -> tuple[str | None, int]:
    """Return the catalog's name of a machine's cards and their number; (None, 0) for one without cards.

    Raises:
        UnexpectedAnswer: When the specs are none.
    """
    try:
        gpus = specs.get("gpus") or ()
        count = sum(int(each["count"]) for each in gpus)
        models = list(dict.fromkeys(str(each.get("model") or "unnamed") for each in gpus if each["count"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnexpectedAnswer(f"hotaisle gave specs that are none: {str(specs)[:200]}") from error
    if not count:
        return None, 0
    variant = from_cloud_id(CLOUD, models[0]) if len(models) == 1 else None
    return (variant.name if variant else " and ".join(models)), count


def offers_of(rows: Sequence[Any], *, account: str, disk_gb: int | None) -> list[Offer]:
    """Return an offer for each kind of machine with cards.

    Args:
        rows: What is available, as Hot Aisle lists it.
        account: Whose offers.
        disk_gb: Disk that is asked for.

    Raises:
        UnexpectedAnswer: For a row that is no kind of machine.
    """
    return [offer for row in rows if (offer := _offer(row, account, disk_gb)) is not None]


def _offer(row: Any, account: str, disk_gb: int | None) -> Offer | None:
    try:
        specs, cents = row["Specs"], row.get("OnDemandPrice")
        quantity, minimum_minutes = int(row["Quantity"]), int(row["MinimumReservationMinutes"])
        usd_per_hour = (cents or 0) / 100
        disk = int(specs["disk_capacity"]) / 1e9
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnexpectedAnswer(
            f"hotaisle lists something that is no kind of machine: {str(row)[:200]}", ambiguous=False
        ) from error
    gpu, count = cards_of(specs)
    if gpu is None:
        return None
    variant = from_cloud_id(CLOUD, gpu)
    unavailable = None
    if not quantity:
        unavailable = "none in stock"
    elif not cents:
        unavailable = "its price is not told"
    elif disk_gb is not None and disk < disk_gb:
        unavailable = f"{disk_gb} GB of disk are asked for, and it has {disk:.0f}"
    return Offer(
        cloud=CLOUD,
        account=account,
        instance_type=shape_of(specs),
        gpu=gpu,
        gpu_count=count,
        used_count=count,
        vram_gb=nominal_vram_gb(variant, 0),
        vcpus=int(specs["cpu_cores"]),
        usd_per_hour=usd_per_hour,
        stock=quantity,
        minimum_minutes=minimum_minutes,
        billing_step_s=BILLING_STEP_S,
        unavailable=unavailable,
        details={"specs": specs},
    )


def description_of(name: str, note: Mapping[str, Any]) -> str:
    """Return the description of a machine of ours: its name, and what Hot Aisle does not remember for us."""
    text = f"{name} {json.dumps(note, ensure_ascii=False)}"
    return text if len(text) <= _LONGEST_NOTE else name


def name_in(description: Any) -> tuple[str, dict[str, Any]]:
    """Return the name that a description carries, and the note after it; the name is empty where nothing is written."""
    text = description.strip() if isinstance(description, str) else ""
    name, _, rest = text.partition(" ")
    try:
        note = json.loads(rest)
    except ValueError:
        note = None
    return (name, note) if isinstance(note, dict) else (text, {})


def box_of(row: Any, *, account: str) -> Box:
    """Return the box that a machine of the listing is, as starting: its state has to be asked for by itself.

    Raises:
        UnexpectedAnswer: When it is no machine.
    """
    gpu, count = cards_of(row)
    try:
        name, note = name_in(row.get("description"))
        access = row.get("ssh_access") or {"ip_address": row["ip_address"], "port": 22}
        created_at, price = note.get("created_at"), note.get("usd_per_hour")
        return Box(
            cloud=CLOUD,
            account=account,
            id=row["name"],
            name=name,
            state=BoxState.STARTING,
            usd_per_hour=float(price) if isinstance(price, int | float) else None,
            endpoint=SshEndpoint(access["ip_address"], int(access["port"]), USERNAME)
            if access["ip_address"]
            else None,
            gpu=gpu,
            gpu_count=count,
            created_at=datetime.fromisoformat(created_at) if isinstance(created_at, str) else None,
            details={
                "billing_step_s": BILLING_STEP_S,
                **{key: note[key] for key in ("owner", "minimum_minutes") if key in note},
            },
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnexpectedAnswer(
            f"hotaisle answered with something that is no machine: {str(row)[:200]} "
            f"({type(error).__name__}: {error})"
        ) from error


def state_of(word: str) -> tuple[BoxState, str]:
    """Return what Hot Aisle's word for a state means; an unknown one says nothing of an end."""
    state = _STATES.get("".join(word.lower().split()), BoxState.STARTING)
    return state, "" if state is BoxState.RUNNING else word
