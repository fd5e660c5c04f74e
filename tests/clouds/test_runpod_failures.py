"""Each failure of RunPod that was seen or is published, and what a lease makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpu_flows.clouds import open_cloud
from gpu_flows.clouds.base import Box, BoxSpec, BoxState, Cloud
from gpu_flows.clouds.errors import (
    AuthenticationFailed,
    CapacityUnavailable,
    CloudError,
    CloudUnreachable,
    NotOffered,
    OutOfBalance,
    RateLimited,
    RequestRefused,
    Scope,
    UnexpectedAnswer,
)
from gpu_flows.gpus.request import GpuRequest
from gpu_flows.leases.provision import ProvisionError
from gpu_flows.leases.teardown import TeardownFailed, teardown
from gpu_flows.offers import Offer, OfferQuery, Spot, match, rank
from tests.clouds.contract import box_name
from tests.emulators.clock import FakeClock
from tests.emulators.http import EMPTY, HTML, Fault, after, hang_up, hang_up_after, instead
from tests.emulators.runpod import KEY, NO_DISK, NO_INSTANCES, RunpodEmulator, problem
from tests.leases.conftest import NAMESPACE, OWNER, Desk

A6000 = OfferQuery(request=GpuRequest.parse("A6000:2"))


@pytest.fixture
def emulator() -> Iterator[RunpodEmulator]:
    with RunpodEmulator() as emulator:
        yield emulator
        assert not emulator.live()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(datetime.now(UTC))


@pytest.fixture
def cloud(emulator: RunpodEmulator, clock: FakeClock) -> Cloud:
    return open_cloud("runpod", api_key=KEY, base_url=emulator.url, clock=clock)


@pytest.fixture
def desk(tmp_path: Path, clock: FakeClock, cloud: Cloud) -> Desk:
    return Desk(clock=clock, folder=tmp_path / "journal", clouds=[cloud])  # type: ignore[list-item]


def says(status: int, detail: str, **headers: str) -> Fault:
    fault = instead(status, problem(status, detail).body, **headers)
    fault.__name__ = f"{status} {detail}"
    return fault


def offers(cloud: Cloud, query: OfferQuery = A6000, **terms: Any) -> list[Offer]:
    return [offer for offer in rank(match(cloud.offers(query), query, **terms)) if offer.unavailable is None]


def spec(**changes: Any) -> BoxSpec:
    base = BoxSpec(
        name=box_name(),
        nonce="n",
        owner='["cli"]',
        ssh_public_key="ssh-ed25519 AAAA me",
        deadline=datetime.now(UTC) + timedelta(hours=1),
    )
    return replace(base, **changes)


def rent(cloud: Cloud) -> Box:
    return cloud.create(offers(cloud)[0], spec())


TOLD = [
    # create
    ("create", says(400, NO_INSTANCES), CapacityUnavailable, Scope.OFFER, False),
    ("create", says(400, NO_DISK), CapacityUnavailable, Scope.OFFER, False),
    (
        "create",
        says(400, "This machine does not have the resources to deploy your pod."),
        CapacityUnavailable,
        Scope.OFFER,
        False,
    ),
    ("create", says(400, "mounts.network requires dataCenterIds"), RequestRefused, Scope.OFFER, False),
    ("create", says(401, "invalid API key"), AuthenticationFailed, Scope.CLOUD, False),
    ("create", says(402, "Insufficient balance"), OutOfBalance, Scope.CLOUD, False),
    ("create", says(403, "access denied"), NotOffered, Scope.OFFER, False),
    ("create", says(404, "template not found"), RequestRefused, Scope.REQUEST, False),
    ("create", says(410, "moved"), UnexpectedAnswer, Scope.CLOUD, False),
    ("create", says(422, "Request validation failed."), RequestRefused, Scope.REQUEST, False),
    ("create", says(429, "rate limit exceeded", Retry_After="12"), RateLimited, Scope.CALL, False),
    ("create", says(500, "could not read the pod back"), CloudUnreachable, Scope.OFFER, True),
    ("create", instead(502, "<html>Bad gateway</html>"), CloudUnreachable, Scope.OFFER, True),
    ("create", hang_up, CloudUnreachable, Scope.OFFER, True),
    ("create", HTML, UnexpectedAnswer, Scope.OFFER, True),
    ("create", EMPTY, UnexpectedAnswer, Scope.OFFER, True),
    ("create", instead(201, {"pod": {}}), UnexpectedAnswer, Scope.OFFER, True),
    ("create", instead(200, {"errors": [{"message": "x"}]}), UnexpectedAnswer, Scope.OFFER, True),
    # the listing
    ("list", says(401, "invalid API key"), AuthenticationFailed, Scope.CLOUD, False),
    ("list", says(403, "access denied"), AuthenticationFailed, Scope.CLOUD, False),
    ("list", says(410, "moved"), UnexpectedAnswer, Scope.CLOUD, False),
    ("list", says(429, "rate limit exceeded", Retry_After="60"), RateLimited, Scope.CALL, False),
    ("list", HTML, UnexpectedAnswer, Scope.OFFER, True),
    ("list", EMPTY, UnexpectedAnswer, Scope.OFFER, True),
    ("list", instead(200, {"success": False, "error": "deprecated"}), UnexpectedAnswer, Scope.OFFER, True),
    ("list", instead(200, []), UnexpectedAnswer, Scope.OFFER, True),
    ("list", instead(200, {"pods": {}}), UnexpectedAnswer, Scope.OFFER, True),
    ("list", instead(200, {"pods": [None]}), UnexpectedAnswer, Scope.OFFER, True),
    ("list", instead(200, {"pods": [{"id": "", "name": ""}]}), UnexpectedAnswer, Scope.OFFER, True),
    ("list", instead(200, {"pods": [{"id": "p", "name": "gf1-x"}]}), UnexpectedAnswer, Scope.OFFER, True),
    # one pod
    ("get", says(403, "access denied"), AuthenticationFailed, Scope.CLOUD, False),
    ("get", HTML, UnexpectedAnswer, Scope.OFFER, True),
    ("get", instead(404, "<html>no such page</html>"), UnexpectedAnswer, Scope.OFFER, True),
    ("delete", says(409, "pod belongs to a cluster"), RequestRefused, Scope.REQUEST, False),
    ("delete", says(500, "try again"), CloudUnreachable, Scope.OFFER, True),
    ("delete", instead(404, "<html>no such page</html>"), UnexpectedAnswer, Scope.OFFER, True),
    # the catalog
    ("catalog", says(401, "invalid API key"), AuthenticationFailed, Scope.CLOUD, False),
    ("catalog", HTML, UnexpectedAnswer, Scope.OFFER, True),
    ("catalog", instead(200, {"gpus": [{"name": "A6000"}]}), UnexpectedAnswer, Scope.OFFER, True),
    ("catalog", instead(200, []), UnexpectedAnswer, Scope.OFFER, True),
]


@pytest.mark.parametrize(
    ("operation", "fault", "error", "scope", "ambiguous"),
    TOLD,
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_runpod_says_means(
    emulator: RunpodEmulator,
    cloud: Cloud,
    operation: str,
    fault: Fault,
    error: type[CloudError],
    scope: Scope,
    ambiguous: bool,
) -> None:
    offer = offers(cloud)[0]
    box = cloud.create(offer, spec())
    calls: dict[str, Callable[[], object]] = {
        "create": lambda: cloud.create(offer, spec()),
        "list": lambda: cloud.find("gf1-"),
        "get": lambda: cloud.describe(box),
        "delete": lambda: cloud.destroy(box),
        "catalog": lambda: cloud.offers(A6000),
    }
    emulator.fault(operation, fault)
    with pytest.raises(CloudError) as told:
        calls[operation]()
    assert type(told.value) is error
    assert (told.value.scope, told.value.ambiguous) == (scope, ambiguous)
    assert KEY not in f"{told.value} {told.value.answer}"
    assert emulator.calls["create"] <= 2, "a create is never repeated"
    cloud.destroy(box)


def test_a_rate_limit_tells_how_long_to_wait(emulator: RunpodEmulator, cloud: Cloud) -> None:
    offer = offers(cloud)[0]
    emulator.fault("create", says(429, "rate limit exceeded", Retry_After="12"))
    with pytest.raises(RateLimited) as told:
        cloud.create(offer, spec())
    assert told.value.retry_after_s == 12


def test_a_pod_that_is_gone_is_gone(emulator: RunpodEmulator, cloud: Cloud) -> None:
    box = rent(cloud)
    cloud.destroy(box)
    emulator.fault("get", says(404, "pod not found"))
    assert cloud.describe(box).state is BoxState.GONE
    cloud.destroy(box)


def test_a_wrong_key_is_told_without_the_key(emulator: RunpodEmulator) -> None:
    wrong = open_cloud("runpod@team_a", api_key="rpa_ANOTHERINVENTEDKEY", base_url=emulator.url)
    with pytest.raises(AuthenticationFailed) as told:
        wrong.find("gf1-")
    assert "rpa_ANOTHER" not in f"{told.value} {told.value.answer} {told.value.hint}"


@pytest.mark.parametrize(
    ("query", "why"),
    [
        (replace(A6000, spot=Spot.ONLY), "interruptible"),
        (replace(A6000, nodes=2), "cluster"),
    ],
)
def test_what_is_left_out_is_refused_with_the_reason(
    emulator: RunpodEmulator, cloud: Cloud, query: OfferQuery, why: str
) -> None:
    with pytest.raises(NotOffered, match=why) as told:
        cloud.offers(query)
    assert told.value.scope is Scope.CLOUD
    assert told.value.hint
    assert emulator.requests == []


# What a lease makes of it.


def test_c01_a_box_that_cannot_be_described_is_destroyed_and_the_first_error_is_told(
    emulator: RunpodEmulator, cloud: Cloud, desk: Desk
) -> None:
    walk = offers(cloud)[:1]
    emulator.fault("get", *[says(403, "access denied to describe")] * 2)
    with pytest.raises(ProvisionError) as told:
        desk.provisioner().provision(desk.lease(), desk.terms(walk))
    assert told.value.code == "AUTHENTICATION_FAILED"
    assert "access denied to describe" in str(told.value)
    assert [row.deletes for row in emulator.book.values()] == [1]


def test_c03_a_teardown_in_another_process_finds_the_box_that_nobody_was_told_of(
    emulator: RunpodEmulator, cloud: Cloud, desk: Desk
) -> None:
    emulator.fault("create", hang_up_after)
    provisioner = desk.provisioner()
    name, wanted = provisioner.renting._spec(cloud, desk.lease(), 0, desk.terms([]))
    with pytest.raises(CloudUnreachable) as told:
        cloud.create(offers(cloud)[0], wanted)
    assert told.value.ambiguous
    assert [row.name for row in emulator.live()] == [str(name)]
    other = open_cloud("runpod", api_key=KEY, base_url=emulator.url, clock=desk.clock)
    report = teardown(OWNER, NAMESPACE, [other], journal=desk.journal(), clock=desk.clock)
    assert [ended.name for ended in report.ended] == [str(name)]


def test_c05_an_odd_listing_closes_nothing_and_rents_nothing(
    emulator: RunpodEmulator, cloud: Cloud, desk: Desk
) -> None:
    walk = offers(cloud)
    desk.provisioner().provision(desk.lease(), desk.terms(walk))
    broken = instead(200, {"success": False, "error": "deprecated_endpoint"})
    emulator.fault("list", *[broken] * 50)
    with pytest.raises(TeardownFailed, match="deprecated_endpoint"):
        teardown(OWNER, NAMESPACE, [cloud], journal=desk.journal(), clock=desk.clock, timeout_s=1)
    with pytest.raises(ProvisionError) as told:
        desk.provisioner().provision(desk.lease(), desk.terms(walk))
    assert told.value.code == "UNEXPECTED_ANSWER"
    assert emulator.calls["create"] == 1
    emulator.faults.clear()
    teardown(OWNER, NAMESPACE, [cloud], journal=desk.journal(), clock=desk.clock)


@pytest.mark.parametrize("status", ["EXITED", "ERROR"])
def test_c09_a_pod_that_has_stopped_is_found_shown_to_bill_and_destroyed(
    emulator: RunpodEmulator, cloud: Cloud, desk: Desk, status: str
) -> None:
    lease, _ = desk.provisioner().provision(desk.lease(), desk.terms(offers(cloud)))
    (row,) = emulator.live()
    emulator.preempt(row, status)
    row.data["mounts"] = {"persistent": {"size": 73, "path": "/workspace"}}
    (found,) = cloud.find(lease.prefix)
    assert found.state in (BoxState.STOPPED, BoxState.FAILED)
    assert found.usd_per_hour
    if status == "EXITED":
        assert found.usd_per_hour == pytest.approx(0.02)  # 73 GB of a stopped volume
    teardown(OWNER, NAMESPACE, [cloud], journal=desk.journal(), clock=desk.clock)
    assert row.deletes == 1


@pytest.mark.parametrize(
    "fault", [after(500, problem(500, "read-back failed").body), hang_up_after, after(200, "")]
)
def test_c11_a_create_that_fails_after_the_pod_exists_is_adopted(
    emulator: RunpodEmulator, cloud: Cloud, desk: Desk, fault: Fault
) -> None:
    walk = offers(cloud)
    emulator.list_lag_polls = 3
    emulator.fault("create", fault)
    lease, attempts = desk.provisioner().provision(desk.lease(), desk.terms(walk))
    assert [row.id for row in emulator.live()] == [lease.boxes[0].box.id]
    assert emulator.calls["create"] == 1
    assert [attempt.code for attempt in attempts] == ["OK"]
    cloud.destroy(lease.boxes[0].box)


def test_c11_a_500_without_a_pod_leads_to_the_next_offer(
    emulator: RunpodEmulator, cloud: Cloud, desk: Desk
) -> None:
    walk = offers(cloud)
    emulator.fault("create", says(500, "nothing was made"))
    lease, attempts = desk.provisioner().provision(desk.lease(), desk.terms(walk))
    assert [attempt.code for attempt in attempts] == ["CLOUD_UNREACHABLE", "OK"]
    assert sum(desk.clock.slept) >= cloud.capabilities.lag_s
    cloud.destroy(lease.boxes[0].box)


def test_c11_a_400_is_not_looked_up(emulator: RunpodEmulator, cloud: Cloud, desk: Desk) -> None:
    walk = offers(cloud)[:1]
    emulator.fault("create", says(400, NO_INSTANCES))
    with pytest.raises(ProvisionError) as told:
        desk.provisioner().provision(desk.lease(), desk.terms(walk))
    assert told.value.code == "CAPACITY_UNAVAILABLE"
    assert not desk.clock.slept
    assert emulator.book == {}


@pytest.mark.parametrize("status", ["EXITED", "ERROR", "TERMINATED"])
def test_c13_a_pod_that_ends_before_it_has_an_address_leads_to_the_next_offer(
    emulator: RunpodEmulator, cloud: Cloud, desk: Desk, status: str
) -> None:
    walk = offers(cloud)
    emulator.births.append(status)
    lease, attempts = desk.provisioner().provision(desk.lease(), desk.terms(walk))
    assert [attempt.code for attempt in attempts] == ["BOX_LOST", "OK"]
    assert len(desk.checked) == 1, "a pod without an address is never connected to"
    assert [row.id for row in emulator.live()] == [lease.boxes[0].box.id]
    cloud.destroy(lease.boxes[0].box)


def test_c13_a_pod_that_runs_without_an_address_is_given_up_at_the_deadline(
    emulator: RunpodEmulator, cloud: Cloud, desk: Desk
) -> None:
    """A host whose CUDA is too old keeps the pod RUNNING, never ready, and bills it."""
    walk = offers(cloud)[:1]
    emulator.gets_address = False
    with pytest.raises(ProvisionError) as told:
        desk.provisioner().provision(desk.lease(), desk.terms(walk, ready_timeout_s=240))
    assert told.value.code == "BOX_NOT_READY"
    assert desk.checked == []


def test_c15_failing_over_destroys_only_its_own(emulator: RunpodEmulator, cloud: Cloud, desk: Desk) -> None:
    theirs = [emulator.stranger("dev-1"), emulator.stranger("gf1-team1-lookalike")]
    walk = offers(cloud)
    emulator.fault("create", says(400, NO_INSTANCES), says(400, NO_INSTANCES))
    _, attempts = desk.provisioner().provision(desk.lease(), desk.terms(walk))
    assert [attempt.code for attempt in attempts] == ["CAPACITY_UNAVAILABLE"] * 2 + ["OK"]
    teardown(OWNER, NAMESPACE, [cloud], journal=desk.journal(), clock=desk.clock)
    assert all(row.deletes == 0 and row.ended_at is None for row in theirs)


def test_c17_a_pool_that_the_account_may_not_use_is_skipped(
    emulator: RunpodEmulator, cloud: Cloud, desk: Desk
) -> None:
    walk = offers(cloud)
    emulator.fault("create", says(403, "access denied"))
    lease, attempts = desk.provisioner().provision(desk.lease(), desk.terms(walk))
    assert [attempt.code for attempt in attempts] == ["NOT_OFFERED", "OK"]
    cloud.destroy(lease.boxes[0].box)


def test_c19_the_tier_that_was_priced_is_the_tier_that_is_rented(
    emulator: RunpodEmulator, cloud: Cloud, desk: Desk
) -> None:
    """A6000:2 costs 0.98 from the community and 1.52 from RunPod itself; the cap is 1.00."""
    walk = offers(cloud, price_cap=1.0)
    assert [offer.details["tier"] for offer in walk] == ["COMMUNITY"]
    lease, _ = desk.provisioner().provision(desk.lease(), desk.terms(walk, price_cap=1.0))
    create = next(request for request in emulator.requests if request.method == "POST")
    assert create.body["cloud"] == "COMMUNITY"
    assert create.body["gpu"]["count"] == 2
    assert lease.boxes[0].box.usd_per_hour == pytest.approx(walk[0].usd_per_hour)
    cloud.destroy(lease.boxes[0].box)


@pytest.mark.parametrize(
    ("drift", "changes", "code"),
    [
        (1.52 / 0.98, {}, "PRICE_TOO_HIGH"),
        (1.0, {"cloud": "SECURE"}, "UNEXPECTED_ANSWER"),
        (1.0, {"gpu": {"id": "NVIDIA RTX A6000", "count": 1}}, "UNEXPECTED_ANSWER"),
        (1.0, {"gpu": {"id": "NVIDIA GeForce RTX 4090", "count": 2}}, "UNEXPECTED_ANSWER"),
    ],
)
def test_c19_what_was_made_dearer_or_otherwise_is_destroyed(
    emulator: RunpodEmulator, cloud: Cloud, desk: Desk, drift: float, changes: dict[str, Any], code: str
) -> None:
    walk = offers(cloud, price_cap=1.0)
    emulator.price_factor, emulator.changes = drift, changes
    with pytest.raises(ProvisionError) as told:
        desk.provisioner().provision(desk.lease(), desk.terms(walk, price_cap=1.0))
    assert told.value.code == code
    assert [row.deletes for row in emulator.book.values()] == [1]


def test_a_pod_in_another_data_centre_than_was_asked_for_is_destroyed(
    emulator: RunpodEmulator, cloud: Cloud, desk: Desk
) -> None:
    """To RunPod the data centres of a create call are a preference; to a user they may be the law."""
    emulator.changes = {"dataCenterId": "US-KS-2"}
    query = replace(A6000, regions=("EU-RO-1",))
    with pytest.raises(ProvisionError, match="data centre US-KS-2 and not EU-RO-1"):
        desk.provisioner().provision(desk.lease(), desk.terms(offers(cloud, query)))
    assert [row.deletes for row in emulator.book.values()] == [1]


def test_a_pod_in_another_data_centre_is_as_good_where_no_region_was_asked_for(
    emulator: RunpodEmulator, cloud: Cloud
) -> None:
    offer = next(offer for offer in offers(cloud) if offer.region == "EU-RO-1")
    emulator.changes = {"dataCenterId": "US-KS-2"}
    box = cloud.create(offer, spec())
    assert box.region == "US-KS-2"
    cloud.destroy(box)


@pytest.mark.parametrize("deletes", [[says(500, "try again")] * 3, [hang_up] * 2, [instead(204)]])
def test_a_delete_that_fails_or_does_nothing_is_repeated_until_the_pod_is_gone(
    emulator: RunpodEmulator, cloud: Cloud, desk: Desk, deletes: list[Fault]
) -> None:
    desk.provisioner().provision(desk.lease(), desk.terms(offers(cloud)))
    emulator.fault("delete", *deletes)
    report = teardown(OWNER, NAMESPACE, [cloud], journal=desk.journal(), clock=desk.clock)
    assert len(report.ended) == 1
    assert emulator.live() == []


@pytest.mark.parametrize(("status", "state"), [("EXITED", BoxState.STOPPED), ("TERMINATED", BoxState.GONE)])
def test_c53_a_pod_that_was_taken_away_serves_no_more(
    emulator: RunpodEmulator, cloud: Cloud, status: str, state: BoxState
) -> None:
    box = rent(cloud)
    emulator.preempt(emulator.book[box.id], status)
    now = cloud.describe(box)
    assert now.state is state
    assert not now.state.may_serve
    cloud.destroy(box)


def test_a_status_that_is_not_published_bills_and_may_serve(emulator: RunpodEmulator, cloud: Cloud) -> None:
    box = rent(cloud)
    emulator.fault("get", instead(200, {**emulator._pod(emulator.book[box.id]), "status": "MIGRATING"}))
    now = cloud.describe(box)
    assert now.state is BoxState.STARTING
    assert "MIGRATING" in now.state_reason
    cloud.destroy(box)


def test_pods_of_clusters_are_not_hidden(emulator: RunpodEmulator, cloud: Cloud) -> None:
    member = emulator.stranger("gf1-cluster-member", cluster={"id": "cl1", "rank": 0})
    assert [box.id for box in cloud.find("gf1-")] == [member.id]
    with pytest.raises(RequestRefused, match="cluster"):
        cloud.destroy(cloud.find("gf1-")[0])


def test_two_accounts_do_not_touch_each_others_boxes(emulator: RunpodEmulator, cloud: Cloud) -> None:
    box = rent(cloud)
    other = open_cloud("runpod@team_a", api_key=KEY, base_url=emulator.url)
    with pytest.raises(RequestRefused, match="not a box of this account"):
        other.destroy(box)
    with pytest.raises(RequestRefused, match="not a box of this account"):
        cloud.destroy(replace(box, id="../clusters/cl1"))
    cloud.destroy(box)
