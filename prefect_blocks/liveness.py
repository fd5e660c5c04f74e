"""Does a flow run still want its boxes? Asked of Prefect, and of this machine's journals."""

from __future__ import annotations

import contextvars
import logging
from pathlib import Path
from uuid import UUID

from gpu_flows.leases.lease import Owner
from gpu_flows.leases.liveness import JournalLiveness

_LOG = logging.getLogger(__name__)


class FlowRunLiveness:
    """Knows whether owners still want their boxes; a `gpu_flows.leases.liveness.OwnerLiveness`.

    A flow run that is being cancelled, or has ended for good, wants nothing. Of one that runs, and where Prefect
    cannot be asked, the journals of this machine say whether the process that holds the boxes is there.

    Args:
        journals: Folder of this machine's journals.
    """

    def __init__(self, journals: Path) -> None:
        self._journals = JournalLiveness(journals)
        self._context = contextvars.copy_context()

    def wants(self, owner: Owner | None, namespace: str, lease: str) -> bool | None:
        """Tell whether the owner of a lease still wants its boxes; None when nobody here knows."""
        run = flow_run_of(owner)
        if run is not None and self._context.copy().run(_has_ended, run):
            return False
        return self._journals.wants(owner, namespace, lease)


def flow_run_of(owner: Owner | None) -> UUID | None:
    """Return the flow run of an owner; None for an owner of another kind."""
    if owner is None or owner.parts[0] != "prefect" or len(owner.parts) < 2:
        return None
    try:
        return UUID(owner.parts[1])
    except ValueError:
        return None


def _has_ended(run: UUID) -> bool:
    """Tell whether a flow run is known to have ended, or to be about to."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(run).state
    except ObjectNotFound:
        return False  # another server's, or deleted: nobody knows
    except Exception as error:  # noqa: BLE001 - whatever keeps Prefect from answering, nothing is known
        _LOG.info("Prefect cannot say how flow run %s is: %s", run, error)
        return False
    return state is not None and (state.is_final() or state.is_cancelling())
