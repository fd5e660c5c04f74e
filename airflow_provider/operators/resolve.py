"""Asking what can be rented."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_provider.operators.base import RentingOperator

if TYPE_CHECKING:
    from airflow.sdk import Context


class ResolveGpuOperator(RentingOperator):
    """Ask the clouds what can be rented now, and rank it; spends nothing.

    The XCom is what `gpu_flows.runs.resolve.Resolution.to_json` gives: ``offers`` in the order in which they
    are worth trying. It takes the arguments of `RentingOperator`.
    """

    def execute(self, context: Context) -> dict[str, Any]:
        """Ask, and return the answers; that nothing can be rented is an answer, too."""
        from gpu_flows.runs.resolve import resolve

        with self.installation() as here:
            found = resolve(self.rental(here.settings), here)
        for ref, reason in found.silent.items():
            self.log.warning("%s gave no offers: %s", ref, reason)
        if found.available:
            for offer in found.available[:10]:
                where = " ".join(filter(None, (offer.cloud, offer.zone or offer.region, offer.instance_type)))
                self.log.info("%s, %.2f dollars per hour", where, offer.usd_per_hour)
        else:
            self.log.warning("%s", found.why_nothing())
        return found.to_json()
