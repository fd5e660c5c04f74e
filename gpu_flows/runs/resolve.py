"""Asking every cloud at once what can be rented now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpu_flows.clouds.base import Cloud, ref_of
from gpu_flows.clouds.errors import CloudError
from gpu_flows.leases.lease import TEARDOWN_SLACK
from gpu_flows.leases.parallel import in_parallel
from gpu_flows.offers import Offer, OfferQuery, explain_no_offer, match, rank
from gpu_flows.runs.installation import Installation
from gpu_flows.runs.rental import Rental


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """What the clouds answered.

    Attributes:
        query: What was asked for.
        offers: Worth trying in this order; unavailable ones come last, with their reason.
        silent: Clouds that gave no offers because they failed, with the reason.
        price_cap: The cap that was applied.
        needed_s: How long a box has to live, on the slowest of the clouds.
    """

    query: OfferQuery
    offers: tuple[Offer, ...]
    silent: dict[str, str]
    price_cap: float | None = None
    needed_s: float = 0.0

    @property
    def available(self) -> tuple[Offer, ...]:
        """The offers that can be rented now."""
        return tuple(offer for offer in self.offers if offer.unavailable is None)

    def why_nothing(self) -> str:
        """Return a sentence on why nothing can be rented, the cheapest offer named where a cap is the reason."""
        said = "; ".join(f"{ref}: {reason}" for ref, reason in self.silent.items())
        if not self.offers and said:
            return f"no cloud could say what it offers for {self.query.request}: {said}"
        why = explain_no_offer(self.offers, self.query, price_cap=self.price_cap, needed_s=self.needed_s)
        return f"{why} ({said})" if said else why

    def to_json(self) -> dict[str, Any]:
        """Return the resolution as plain JSON values."""
        return {
            "request": self.query.request.to_json(),
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
    needed_s = [_needed_s(cloud, rental) for cloud in clouds]
    matched = [
        offer
        for offers, seconds in zip(found, needed_s, strict=True)
        for offer in match(offers, rental.query, price_cap=rental.price_cap, needed_s=seconds)
    ]
    order = tuple(ref_of(cloud) for cloud in clouds)
    return Resolution(
        query=rental.query,
        offers=tuple(rank(matched, rental.strategy, spot=rental.spot, clouds=order)),
        silent=silent,
        price_cap=rental.price_cap,
        needed_s=max(needed_s, default=0.0),
    )


def _needed_s(cloud: Cloud, rental: Rental) -> float:
    """Return how long a box of a cloud has to live, from its create call on."""
    ready_s = rental.ready_timeout_s or cloud.capabilities.ready_timeout_s
    return ready_s + rental.max_duration.total_seconds() + TEARDOWN_SLACK.total_seconds()


def _ask(clouds: Sequence[Cloud], rental: Rental) -> tuple[list[list[Offer]], dict[str, str]]:
    outcomes = in_parallel([partial(cloud.offers, rental.query) for cloud in clouds], interruptible=True)
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
