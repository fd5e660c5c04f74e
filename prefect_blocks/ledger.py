"""What a flow run holds, written on the flow run itself: labels, which any other process can read.

A hook runs in a fresh process, often on another machine. All that it needs to tear down is there before
anything is rented.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from gpu_flows.errors import BadRequest
from gpu_flows.leases.lease import Owner, lease_id

_LABEL = "gpu-flows.lease."


@dataclass(frozen=True, slots=True)
class Entry:
    """One lease of a flow run.

    Attributes:
        owner: Who answers for it.
        namespace: The installation.
        clouds: Where it may have rented, as ``cloud`` or ``cloud@account``.
    """

    owner: Owner
    namespace: str
    clouds: tuple[str, ...]

    @property
    def label(self) -> dict[str, bool | int | float | str]:
        """The label that says it."""
        text = {"owner": list(self.owner.parts), "namespace": self.namespace, "clouds": list(self.clouds)}
        return {f"{_LABEL}{lease_id(self.owner, self.namespace)}": json.dumps(text, ensure_ascii=False)}


def current_flow_run() -> UUID:
    """Return the flow run that this code runs in, also from within one of its tasks.

    Raises:
        BadRequest: Outside of a flow run.
    """
    from prefect.runtime import flow_run

    if not flow_run.id:
        raise BadRequest(
            "this needs a flow run, whose id names the boxes",
            hint="call it in a flow, or use gpu_flows.gpu_box",
        )
    return UUID(str(flow_run.id))


def owner_in_flow(name: str, key: str = "0") -> Owner:
    """Return the owner of boxes in the current flow run.

    Args:
        name: Names the scope within the flow.
        key: Tells scopes of the same name apart, such as the cells of a sweep.
    """
    return Owner(("prefect", str(current_flow_run()), name, key))


def enter(entry: Entry) -> None:
    """Write a lease on the current flow run and on the one at the root of it, whose hooks may be all that runs."""
    from prefect.client.orchestration import get_client
    from prefect.runtime import flow_run

    runs = {str(run) for run in (flow_run.id, flow_run.root_flow_run_id) if run}
    with get_client(sync_client=True) as client:
        for run in sorted(runs):
            client.update_flow_run_labels(UUID(run), entry.label)


def entries(labels: Mapping[str, Any]) -> list[Entry]:
    """Return the leases that the labels of a flow run tell of; a label that cannot be read is an error."""
    found = [json.loads(str(text)) for key, text in sorted(labels.items()) if key.startswith(_LABEL)]
    return [Entry(Owner(tuple(each["owner"])), each["namespace"], tuple(each["clouds"])) for each in found]


def leases_of(flow_run: Any) -> list[Entry]:
    """Return the leases of a flow run: what its labels tell; without any, what its parameters name.

    Args:
        flow_run: As a hook gets it. Its labels may be older than the leases, so they are read again.
    """
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        fresh = client.read_flow_run(flow_run.id)
    return entries(fresh.labels or {}) or _from_parameters(fresh)


def _from_parameters(flow_run: Any) -> list[Entry]:
    """Return the lease of a flow whose parameters say it all: ``name``, ``key`` and ``clouds``, also in ``renting``."""
    from prefect_blocks.settings import current_settings

    parameters = dict(flow_run.parameters or {})
    renting = parameters.get("renting")
    if isinstance(renting, Mapping):
        parameters = {**renting, **parameters}
    clouds: Sequence[str] | str | None = parameters.get("clouds")
    settings = current_settings()
    name, key = str(parameters.get("name") or ""), str(parameters.get("key") or "0")
    if not clouds or not name or settings.namespace is None:
        return []
    named = [clouds] if isinstance(clouds, str) else [each for each in clouds if isinstance(each, str)]
    return [Entry(Owner(("prefect", str(flow_run.id), name, key)), settings.namespace, tuple(named))]
