from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpu_flows.clouds.base import Box
from gpu_flows.endpoint import SshEndpoint
from gpu_flows.leases.journal import Journal
from gpu_flows.leases.lease import Lease, Owner
from gpu_flows.leases.provision import Provisioner, Terms
from gpu_flows.offers import Offer
from gpu_flows.progress import Progress
from tests.emulators.clock import FakeClock
from tests.emulators.memory import MemoryCloud, query

NAMESPACE = "team1"
OWNER = Owner(("cli", "nightly-7"))


@dataclass
class Desk:
    """Everything that a lease needs, around emulated clouds and a clock that only moves when slept on."""

    clock: FakeClock
    folder: Path
    clouds: list[MemoryCloud] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    told: list[Progress] = field(default_factory=list)
    check_errors: list[Exception] = field(default_factory=list)
    wanted: bool | None = None
    started_jobs: set[str] = field(default_factory=set)

    def cloud(self, name: str = "memory", **kwargs: Any) -> MemoryCloud:
        cloud = MemoryCloud(self.clock, name, **kwargs)
        self.clouds.append(cloud)
        return cloud

    def journal(self, owner: Owner = OWNER) -> Journal:
        lease = Lease(owner=owner, namespace=NAMESPACE, clouds=())
        return Journal(self.folder, NAMESPACE, lease.id, self.clock)

    def lease(self, nodes: int = 1, owner: Owner = OWNER) -> Lease:
        from gpu_flows.clouds.base import ref_of

        return Lease(
            owner=owner, namespace=NAMESPACE, clouds=tuple(ref_of(c) for c in self.clouds), nodes=nodes
        )

    def check(self, box: Box, offer: Offer | None, *, timeout_s: float) -> tuple[SshEndpoint, dict[str, Any]]:
        self.checked.append(box.id)
        if self.check_errors:
            raise self.check_errors.pop(0)
        assert box.endpoint is not None
        return SshEndpoint(box.endpoint.host, host_key="ssh-ed25519 AAAA"), {"python": "3.11"}

    def wants(self, owner: Owner | None, namespace: str, lease: str) -> bool | None:
        return self.wanted

    def provisioner(self, owner: Owner = OWNER) -> Provisioner:
        return Provisioner(
            self.clouds,
            journal=self.journal(owner),
            public_key=lambda cloud: f"ssh-ed25519 AAAA {cloud.name}",
            boot_script=lambda deadline, end, **_: f"# until {deadline:%s}\n{end}",
            check=self.check,
            liveness=self,
            job_started=lambda box: box.id in self.started_jobs,
            clock=self.clock,
            listener=self.told.append,
        )

    def terms(self, offers: Sequence[Offer] | Callable[[], Sequence[Offer]], **kwargs: Any) -> Terms:
        walk = offers if callable(offers) else lambda: offers
        return Terms(query=query(nodes=kwargs.pop("nodes", 1)), offers=walk, **kwargs)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(clock=FakeClock(), folder=tmp_path / "journal")
