"""Renting: the name of the lease first, then its boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from airflow_provider.links.console import ConsoleLink
from airflow_provider.operators.base import RentingOperator

if TYPE_CHECKING:
    from airflow.sdk import BaseOperatorLink, Context

_NO_CAPACITY = "CAPACITY_UNAVAILABLE"


class ReserveBoxOperator(RentingOperator):
    """Compute the lease, and remember where it may rent; asks no cloud anything.

    Airflow runs a teardown only when a setup has succeeded: this one does, whatever becomes of the renting,
    so that the teardown runs also when provisioning failed or was killed.

    Args:
        box: Which box, from `gpu_box`; or a name.
        **kwargs: As for `RentingOperator`.
    """

    template_fields: Sequence[str] = ("box", *RentingOperator.RENTAL)

    def __init__(self, *, box: Mapping[str, Any] | str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.box = box

    def execute(self, context: Context) -> dict[str, Any]:
        """Reserve, and return the lease without boxes."""
        from gpu_flows.runs.steps import reserve

        with self.installation() as here:
            owner = self.box_owner(self.box, context)
            lease = reserve(owner, self.rental(here.settings), installation=here)
        self.log.info("lease %s of %s, on %s", lease.id, owner, ", ".join(lease.clouds))
        return lease.to_json()


class ProvisionBoxOperator(RentingOperator):
    """Rent the boxes of a lease, failing over until every node is ready and checked.

    A retry finds the boxes of the attempt before it, by the name that they carry. The XCom is the lease
    (`gpu_flows.leases.lease.Lease.to_json`); the tasks that use the box do not need it.

    Args:
        box: Which box, from `gpu_box`; or a name.
        deferrable: Free the worker slot while there is no capacity; Airflow's default unless given.
        poll_interval: Seconds between two looks for capacity while deferred.
        **kwargs: As for `RentingOperator`.
    """

    template_fields: Sequence[str] = ("box", *RentingOperator.RENTAL)
    operator_extra_links: Sequence[BaseOperatorLink] = (ConsoleLink(),)

    def __init__(
        self,
        *,
        box: Mapping[str, Any] | str,
        deferrable: bool | None = None,
        poll_interval: float = 60.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.box = box
        self.deferrable = deferrable
        self.poll_interval = poll_interval

    def execute(self, context: Context) -> dict[str, Any]:
        """Rent, and return the lease."""
        from gpu_flows.runs.rental import duration

        until = datetime.now(UTC) + duration("wait_for_capacity", self.wait_for_capacity)
        return self._provision(context, until)

    def execute_again(self, context: Context, event: dict[str, Any], until: str) -> dict[str, Any]:
        """Rent after a wait: there was an offer a moment ago, or the wait is over."""
        if event.get("error"):
            self.log.warning("waiting for capacity: %s", event["error"])
        return self._provision(context, datetime.fromisoformat(until))

    def _provision(self, context: Context, until: datetime) -> dict[str, Any]:
        from dataclasses import replace
        from datetime import timedelta

        from airflow_provider.settings import default_deferrable
        from gpu_flows.leases.provision import ProvisionError
        from gpu_flows.runs.steps import provision_box, reserve

        defers = default_deferrable() if self.deferrable is None else self.deferrable
        with self.installation() as here:
            wanted = self.rental(here.settings)
            left = max(timedelta(0), until - datetime.now(UTC))
            wanted = replace(wanted, wait_for_capacity=timedelta(0) if defers else left)
            lease = reserve(self.box_owner(self.box, context), wanted, installation=here)
            try:
                filled, attempts = provision_box(lease, wanted, installation=here)
            except ProvisionError as error:
                for attempt in error.attempts:
                    self.log.warning("%s %s: %s", attempt.cloud, attempt.instance_type, attempt.reason)
                if not defers or error.code != _NO_CAPACITY or not left:
                    raise
                self.log.info("no capacity now; waiting for it until %s", until.isoformat())
                filled = None
            if filled is not None:
                self._tell(filled, len(attempts), context)
                return filled.to_json()
        self._wait(until)
        raise AssertionError("unreachable: defer raises")

    def _wait(self, until: datetime) -> None:
        from airflow_provider.triggers.capacity import CapacityTrigger

        self.defer(
            trigger=CapacityTrigger(
                parameters=plain(self.rental_parameters()),
                until=until.isoformat(),
                poll_interval=self.poll_interval,
            ),
            method_name="execute_again",
            kwargs={"until": until.isoformat()},
        )

    def _tell(self, lease: Any, offers: int, context: Context) -> None:
        for leased in lease.boxes:
            self.log.info(
                "node %d: %s box %s, %s", leased.node, leased.box.cloud, leased.box.id, leased.box.name
            )
        self.log.info(
            "%.2f dollars per hour, until %s at the latest, after %d offers",
            lease.usd_per_hour,
            lease.deadline,
            offers,
        )
        ConsoleLink.keep(context, lease.boxes[0].box)


def plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters as plain JSON values, for a trigger."""
    from datetime import timedelta

    def value_of(value: Any) -> Any:
        if isinstance(value, timedelta):
            return value.total_seconds()
        return list(value) if isinstance(value, tuple) else value

    return {name: value_of(value) for name, value in parameters.items()}
