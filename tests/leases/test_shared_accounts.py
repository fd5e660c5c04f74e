"""Several installations, accounts and clouds at once: nobody touches the other's box, and everything is told."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from gpu_flows.clouds.base import Box
from gpu_flows.leases.journal import Journal
from gpu_flows.leases.lease import Lease, Owner, lease_id
from gpu_flows.leases.provision import Provisioner, ProvisionError
from gpu_flows.leases.reaper import Standing, reap, survey
from gpu_flows.leases.teardown import teardown
from tests.emulators.memory import MemoryCloud
from tests.leases.conftest import Desk

DAG_RUN = Owner(("airflow", "retrain", "scheduled__2026-06-01", "train", "-1"))


def provision(
    desk: Desk, cloud: MemoryCloud, namespace: str, *, nodes: int = 1, owner: Owner = DAG_RUN
) -> list[Box]:
    lease = Lease(owner=owner, namespace=namespace, clouds=(cloud.name,), nodes=nodes)
    provisioner = Provisioner(
        [cloud],
        journal=Journal(desk.folder, namespace, lease.id, desk.clock),
        public_key=lambda _: "ssh-ed25519 AAAA",
        boot_script=lambda *_, **__: "",
        check=desk.check,
        clock=desk.clock,
    )
    filled, _ = provisioner.provision(lease, desk.terms([cloud.offer()], nodes=nodes))
    return [leased.box for leased in filled.boxes]


def tear_down(desk: Desk, cloud: MemoryCloud, namespace: str, owner: Owner = DAG_RUN) -> set[str]:
    journal = Journal(desk.folder, namespace, lease_id(owner, namespace), desk.clock)
    report = teardown(owner, namespace, [cloud], journal=journal, clock=desk.clock)
    return {box.id for box in report.ended}


def test_two_installations_with_equal_runs_on_one_account(desk: Desk) -> None:
    """Names that are prefixes of one another, and node 1 beside node 10, among them."""
    cloud = desk.cloud()
    boxes = {space: provision(desk, cloud, space, nodes=11) for space in ("team", "team1", "tea", "a")}
    assert len({box.id for held in boxes.values() for box in held}) == 44
    assert tear_down(desk, cloud, "team") == {box.id for box in boxes["team"]}
    desk.clock.advance(40 * 3600)
    seen = survey([cloud], "team1", clock=desk.clock)
    assert {s.box.id for s in seen.sightings if s.standing is Standing.EXPIRED} == {
        b.id for b in boxes["team1"]
    }
    reap(seen, [cloud], journals=desk.folder, clock=desk.clock)
    assert {record.box.id for record in cloud.live()} == {
        b.id for space in ("tea", "a") for b in boxes[space]
    }


def test_two_accounts_of_one_cloud(desk: Desk, tmp_path: Path) -> None:
    one, two = desk.cloud("runpod"), desk.cloud("runpod", account="team_a")
    (mine,) = provision(desk, one, "x")
    # The other account is rented from by another machine, with a journal of its own.
    desk.folder = tmp_path / "elsewhere"
    (theirs,) = provision(desk, two, "x")
    desk.folder = tmp_path / "journal"
    assert tear_down(desk, one, "x") == {mine.id}
    assert [record.box.id for record in two.live()] == [theirs.id]


def test_mapped_tasks_and_retries_of_one_run(desk: Desk) -> None:
    cloud = desk.cloud()
    owners = [Owner(("airflow", "retrain", "run", "train", str(index))) for index in (1, 10, 11)]
    held = {owner: provision(desk, cloud, "x", owner=owner) for owner in owners}
    again = {owner: provision(desk, cloud, "x", owner=owner) for owner in owners}
    assert {o: boxes[0].id for o, boxes in held.items()} == {o: boxes[0].id for o, boxes in again.items()}
    assert tear_down(desk, cloud, "x", owners[0]) == {held[owners[0]][0].id}
    assert len(cloud.live()) == 2


def test_a_hundred_dead_offers_are_walked_and_the_error_can_be_read(desk: Desk) -> None:
    clouds = [desk.cloud(f"cloud{number}") for number in range(5)]
    offers = []
    for number, (cloud, region) in enumerate(product(clouds, range(20))):
        cloud.faults.create.append("no_capacity")
        offers.append(replace(cloud.offer(), region=f"region-{region % 14}", instance_type=f"type-{number}"))
    with pytest.raises(ProvisionError) as caught:
        desk.provisioner().provision(desk.lease(), desk.terms(offers))
    assert sum(cloud.calls["create"] for cloud in clouds) == 100
    assert [attempt.code for attempt in caught.value.attempts] == ["CAPACITY_UNAVAILABLE"] * 100
    assert caught.value.code == "CAPACITY_UNAVAILABLE"
    text = str(caught.value)
    assert "none of 100 offers" in text
    assert "90 more" in text
    assert len(text.splitlines()) <= 13
    assert max(map(len, text.splitlines())) < 200
