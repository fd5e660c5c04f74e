"""Asking every cloud at once what can be rented now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpu_flows.clouds.base import Cloud, ref_of
from gpu_flows.clouds.errors import CloudError
from gpu_flows.gpus.request import GpuRequest
from gpu_flows.leases.lease import TEARDOWN_SLACK
from gpu_flows.leases.parallel import in_parallel
from gpu_flows.offers import Offer, explain, match, rank
from gpu_flows.runs.installation import Installation
from gpu_flows.runs.rental import Rental


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """What the clouds answered.

    Attributes:
        request: What was asked for.
        offers: Worth trying in this order; unavailable ones come last, with their reason.
        silent: Clouds that gave no offers because they failed, with the reason.
        price_cap: The cap that was applied.
    """

    request: GpuRequest
    offers: tuple[Offer, ...]
    silent: dict[str, str]
    price_cap: float | None = None

    @property
    def available(self) -> tuple[Offer, ...]:
        """The offers that can be rented now."""
        return tuple(offer for offer in self.offers if offer.unavailable is None)

    def why_nothing(self) -> str:
        """Return a sentence on why nothing can be rented, the cheapest offer named where a cap is the reason."""
        said = "; ".join(f"{ref}: {reason}" for ref, reason in self.silent.items())
        if not self.offers and said:
            return f"no cloud could say what it offers for {self.request}: {said}"
        return explain(self.offers, self.request, price_cap=self.price_cap) + (f" ({said})" if said else "")

    def to_json(self) -> dict[str, Any]:
        """Return the resolution as plain JSON values."""
        return {
            "request": self.request.to_json(),
            "offers": [offer.to_json() for offer in self.offers],
            "silent": dict(self.silent),
            "price_cap": self.price_cap,
        }


def resolve(rental: Rental, installation: Installation) -> Resolution:
    """Ask the clouds of a rental, all at once.

    A cloud that fails is named with its reason and does not keep the others from answering.
    """
    clouds = installation.clouds(rental.clouds)
    found, silent = _ask(clouds, rental)
    order = {ref_of(cloud): position for position, cloud in enumerate(clouds)}
    matched: list[Offer] = []
    for cloud, offers in zip(clouds, found, strict=True):
        ready_s = rental.ready_timeout_s or cloud.capabilities.ready_timeout_s
        needed_s = ready_s + rental.max_duration.total_seconds() + TEARDOWN_SLACK.total_seconds()
        matched += match(offers, rental.query, price_cap=rental.price_cap, needed_s=needed_s)
    ranked = rank(matched, rental.strategy, spot=rental.spot, clouds=tuple(order))
    return Resolution(request=rental.request, offers=tuple(ranked), silent=silent, price_cap=rental.price_cap)


def _ask(clouds: Sequence[Cloud], rental: Rental) -> tuple[list[list[Offer]], dict[str, str]]:
    outcomes = in_parallel([partial(cloud.offers, rental.query) for cloud in clouds])
    found: list[list[Offer]] = []
    silent: dict[str, str] = {}
    for cloud, outcome in zip(clouds, outcomes, strict=True):
        if isinstance(outcome, CloudError):
            silent[ref_of(cloud)] = str(outcome)
            found.append([])
        elif isinstance(outcome, Exception):
            raise outcome
        else:
            found.append(outcome)
    return found, silent
