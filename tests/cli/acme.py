"""An invented cloud for the command line: what it offers and what it holds, a test says."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gpu_flows.clouds import CLOUDS
from gpu_flows.clouds.base import Box
from gpu_flows.leases.lease import BoxName, Owner, lease_id, new_nonce
from tests.emulators.clock import FakeClock
from tests.emulators.memory import MemoryCloud

_OPEN: dict[str, MemoryCloud] = {}


def open_acme(account: str = "default", **_: Any) -> MemoryCloud:
    """Open an account, as the registry of clouds does."""
    return _OPEN[account]


class Market:
    """The cloud as a test sees it.

    Attributes:
        cloud: The cloud itself.
    """

    def __init__(self, cloud: MemoryCloud) -> None:
        self.cloud = cloud

    def sells(self, *prices: float, **changes: Any) -> None:
        """Offer eight H100 at each of these prices."""
        self.cloud.stock += [self.cloud.offer(usd_per_hour=price, **changes) for price in prices]

    def holds(self, owner: str, namespace: str, *, ends_in: timedelta, node: int = 0, **more: Any) -> Box:
        """Hold a box of an owner."""
        who = Owner.parse(owner)
        now = datetime.now(UTC)
        name = BoxName(
            namespace=namespace,
            lease=lease_id(who, namespace),
            node=node,
            created=now - timedelta(hours=1),
            nonce=new_nonce(),
            deadline=now + ends_in,
        )
        return self.cloud.add(str(name), **more)


def open_market(monkeypatch: pytest.MonkeyPatch) -> Market:
    """Register the cloud for a test."""
    cloud = MemoryCloud(FakeClock(datetime.now(UTC)), name="acme")
    monkeypatch.setitem(_OPEN, "default", cloud)
    monkeypatch.setitem(CLOUDS, "acme", "tests.cli.acme:open_acme")
    return Market(cloud)
