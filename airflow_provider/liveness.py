"""Does a run still want its boxes? Airflow knows."""

from __future__ import annotations

import logging
from collections.abc import Callable

from gpu_flows.leases.lease import Owner
from gpu_flows.leases.liveness import OwnerLiveness

_ENDED = frozenset({"success", "failed"})

log = logging.getLogger(__name__)


def run_state(dag_id: str, run_id: str) -> str | None:
    """Return the state of a run by the task's own channel to Airflow; None when Airflow knows no such run."""
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    state = RuntimeTaskInstance.get_dagrun_state(dag_id, run_id)
    return str(getattr(state, "value", state)) if state else None


class AirflowLiveness:
    """A run that has ended no longer wants its boxes; a `gpu_flows.leases.liveness.OwnerLiveness`.

    Args:
        fallback: Asked about owners that are no runs of Airflow.
        ask: Returns the state of a run.
    """

    def __init__(
        self,
        fallback: OwnerLiveness | None = None,
        ask: Callable[[str, str], str | None] = run_state,
    ) -> None:
        self._fallback = fallback
        self._ask = ask

    def wants(self, owner: Owner | None, namespace: str, lease: str) -> bool | None:
        """Tell whether the owner wants its boxes; None when Airflow cannot be asked or knows no such run."""
        if owner is None or owner.parts[0] != "airflow" or len(owner.parts) != 5:
            return self._fallback.wants(owner, namespace, lease) if self._fallback else None
        try:
            state = self._ask(owner.parts[1], owner.parts[2])
        except Exception as error:  # noqa: BLE001 - whatever it is, an unknown owner is never taken for ended
            log.warning("whether the run of %s has ended cannot be told: %s", owner, error)
            return None
        return None if state is None else state not in _ENDED
