"""Which box a task means: the owner of its lease, computed from the run that the task is part of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow.sdk import Context

    from gpu_flows.leases.lease import Owner
    from gpu_flows.settings import Settings

NOT_MAPPED = -1


class HeldBox(dict[str, Any]):
    """What `gpu_box` hands to the tasks within it: plain values, so that it is serialised with them.

    Keys: ``name`` (id of the group or task that answers for the box), ``mapped`` (whether each map index has
    a box of its own), ``gpus``, ``clouds``, and ``provision`` (the task that rents). It names a box and holds
    no trace of one: whether there is one, and where, is asked of the clouds.
    """


def owner_of(box: Mapping[str, Any] | str, context: Context) -> Owner:
    """Return who answers for a box: the same for every task, retry and clear of a run.

    Args:
        box: From `gpu_box`, or a name of one's own.
        context: Of the task.
    """
    from gpu_flows.errors import BadRequest
    from gpu_flows.leases.lease import Owner

    ti = context["ti"]
    name, mapped = (box, False) if isinstance(box, str) else (box.get("name"), bool(box.get("mapped")))
    if not name:
        raise BadRequest("box= has to be what gpu_box gives, or a name")
    index = ti.map_index if mapped and ti.map_index is not None else NOT_MAPPED
    return Owner(("airflow", ti.dag_id, ti.run_id, str(name), str(index)))


def listed(clouds: Sequence[str] | str | None) -> list[str]:
    """Return a list of clouds, which a template may have written as one text."""
    asked = [clouds] if isinstance(clouds, str) else list(clouds or ())
    return [part.strip() for item in asked for part in item.split(",") if part.strip()]


def refs_of(
    box: Mapping[str, Any] | str, clouds: Sequence[str] | str | None, settings: Settings
) -> list[str] | None:
    """Return where a box may have been rented, as far as its task says; None when it does not.

    Args:
        box: From `gpu_box`, or a name.
        clouds: What the task was told itself.
        settings: The installation's settings, which fill in what the task that rents leaves open.
    """
    from gpu_flows.clouds import CloudRef
    from gpu_flows.gpus.request import GpuRequest

    told = listed(clouds)
    if not told and not isinstance(box, str):
        told = listed(box.get("clouds"))
        if not told and box.get("gpus"):
            told = ["local"] if GpuRequest.parse(box["gpus"]).is_cpu else list(settings.clouds)
    return [str(CloudRef.parse(ref)) for ref in told] or None
