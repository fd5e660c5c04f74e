"""Which box a task means: the owner of its lease, computed from the run that the task is part of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpu_flows.errors import BadRequest
from gpu_flows.leases.lease import Owner

if TYPE_CHECKING:
    from airflow.sdk import Context

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
    ti = context["ti"]
    name, mapped = (box, False) if isinstance(box, str) else (box.get("name"), bool(box.get("mapped")))
    if not name:
        raise BadRequest("box= has to be what gpu_box gives, or a name")
    index = ti.map_index if mapped and ti.map_index is not None else NOT_MAPPED
    return Owner(("airflow", ti.dag_id, ti.run_id, str(name), str(index)))
