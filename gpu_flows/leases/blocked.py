"""What is not worth asking again for a while: scopes that failed, by account, with an expiry."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType

from gpu_flows.clock import SYSTEM_CLOCK, Clock
from gpu_flows.clouds.errors import CloudError, Scope
from gpu_flows.offers import Offer

LIFETIME_S: Mapping[Scope, float] = MappingProxyType(
    {
        Scope.OFFER: 120,
        Scope.ZONE: 300,
        Scope.REGION: 600,
        Scope.FAMILY: 900,
        Scope.CLOUD: 300,
    }
)
"""How long a scope stays blocked: stock comes back in minutes, quota does not."""


class BlockedScopes:
    """A negative cache of failures; safe to share between the runs of a process.

    Args:
        clock: Decides when an entry has expired.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._until: dict[tuple[str, ...], tuple[float, str]] = {}
        self._lock = threading.Lock()

    def block(self, offer: Offer, error: CloudError) -> None:
        """Remember a failure for the scope that it reaches."""
        key = _key(offer, error.scope)
        if key is None:
            return
        lifetime_s = max(LIFETIME_S[error.scope], error.retry_after_s or 0.0)
        with self._lock:
            self._until[key] = (self._clock.monotonic() + lifetime_s, f"{error.code}: {error}")

    def why(self, offer: Offer) -> str | None:
        """Return why an offer is not worth trying now, or None when it is."""
        now = self._clock.monotonic()
        with self._lock:
            for scope in LIFETIME_S:
                key = _key(offer, scope)
                entry = self._until.get(key) if key else None
                if entry and entry[0] > now:
                    return entry[1]
        return None


def _key(offer: Offer, scope: Scope) -> tuple[str, ...] | None:
    account = (offer.cloud, offer.account)
    market = "spot" if offer.spot else "on-demand"
    match scope:
        case Scope.CLOUD:
            return (*account, "cloud")
        case Scope.REGION:
            return (*account, "region", offer.region)
        case Scope.ZONE:
            return (*account, "zone", offer.region, offer.zone or "")
        case Scope.FAMILY:
            return (*account, "family", offer.region, offer.gpu or "cpu", market)
        case Scope.OFFER:
            where = (offer.region, offer.zone or "", offer.machine or "")
            return (*account, "offer", *where, offer.instance_type, market)
        case _:
            return None
