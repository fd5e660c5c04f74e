"""Each failure of Hot Aisle that was seen or is published, and what a lease makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpu_flows.clouds import open_cloud
from gpu_flows.clouds._http import HttpApi
from gpu_flows.clouds.base import Box, BoxSpec, BoxState, Cloud
from gpu_flows.clouds.errors import (
    AuthenticationFailed,
    CapacityUnavailable,
    CloudError,
    CloudUnreachable,
    NotOffered,
    OutOfBalance,
    QuotaExceeded,
    RateLimited,
    RequestRefused,
    Scope,
    UnexpectedAnswer,
)
from gpu_flows.clouds.hotaisle import cloud as adapter
from gpu_flows.clouds.hotaisle.machines import description_of, name_in
from gpu_flows.clouds.hotaisle.turns import turn_at
from gpu_flows.gpus.request import GpuRequest
from gpu_flows.leases.provision import ProvisionError
from gpu_flows.leases.teardown import TeardownFailed, teardown
from gpu_flows.offers import Offer, OfferQuery, match, rank
from tests.clouds.contract import box_name
from tests.emulators.clock import FakeClock
from tests.emulators.hotaisle import KEY, TEAM, HotAisleEmulator
from tests.emulators.http import EMPTY, HTML, Fault, after, hang_up, hang_up_after, instead, stall_after
from tests.leases.conftest import NAMESPACE, OWNER, Desk

QUERY = OfferQuery(request=GpuRequest.parse("MI300X"))
FULL = "Maximum VMs already provisioned for this team"
NONE = "No available virtual machine matching requested specifications"


@pytest.fixture
def emulator() -> Iterator[HotAisleEmulator]:
    with HotAisleEmulator() as emulator:
        yield emulator
        assert not emulator.live()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(datetime.now(UTC))


@pytest.fixture
def cloud(emulator: HotAisleEmulator, clock: FakeClock, tmp_path: Path) -> Cloud:
    emulator.now = clock.now  # type: ignore[method-assign]  # ours sleeps 330 s in no time
    return open_cloud(
        "hotaisle", api_key=KEY, team=TEAM, base_url=emulator.base_url, state=str(tmp_path), clock=clock
    )


@pytest.fixture
def desk(tmp_path: Path, clock: FakeClock, cloud: Cloud) -> Desk:
    return Desk(clock=clock, folder=tmp_path / "journal", clouds=[cloud])  # type: ignore[list-item]


def offers(cloud: Cloud, query: OfferQuery = QUERY) -> list[Offer]:
    return [offer for offer in rank(match(cloud.offers(query), query)) if offer.unavailable is None]


def spec(**changes: Any) -> BoxSpec:
    base = BoxSpec(
        name=box_name(),
        nonce="n",
        owner='["cli"]',
        ssh_public_key="ssh-ed25519 AAAA me",
        deadline=datetime.now(UTC) + timedelta(hours=1),
    )
    return replace(base, **changes)


def rent(cloud: Cloud, **changes: Any) -> Box:
    return cloud.create(offers(cloud)[0], spec(**changes))


def provision(desk: Desk, walk: list[Offer]) -> Any:
    return desk.provisioner().provision(desk.lease(), desk.terms(walk, allow_unreaped=True))


TOLD = [
    # create
    ("create", instead(401, FULL), QuotaExceeded, Scope.CLOUD, False),
    ("create", instead(401, "Unauthorized"), AuthenticationFailed, Scope.CLOUD, False),
    ("create", instead(402, "Insufficient balance"), OutOfBalance, Scope.CLOUD, False),
    ("create", instead(403, "Forbidden: Permission denied"), AuthenticationFailed, Scope.CLOUD, False),
    ("create", instead(404, NONE), CapacityUnavailable, Scope.OFFER, False),
    ("create", instead(400, "Bad Request: Invalid input"), RequestRefused, Scope.OFFER, False),
    ("create", instead(422, "Unprocessable Entity"), RequestRefused, Scope.OFFER, False),
    ("create", instead(428, "Precondition Required"), RequestRefused, Scope.CLOUD, False),
    ("create", instead(429, "slow down"), RateLimited, Scope.CALL, False),
    ("create", instead(500, "Internal Server Error"), CloudUnreachable, Scope.OFFER, True),
    ("create", instead(504, "<html>Gateway timeout</html>"), CloudUnreachable, Scope.OFFER, True),
    ("create", hang_up, CloudUnreachable, Scope.OFFER, True),
    ("create", HTML, UnexpectedAnswer, Scope.OFFER, True),
    ("create", EMPTY, UnexpectedAnswer, Scope.OFFER, True),
    ("create", instead(200, {"ip_address": "192.0.2.1"}), UnexpectedAnswer, Scope.OFFER, True),
    ("create", instead(200, {"name": ""}), UnexpectedAnswer, Scope.OFFER, True),
    # the listing
    ("list", instead(401, "Unauthorized"), AuthenticationFailed, Scope.CLOUD, False),
    ("list", instead(404, "Not Found"), AuthenticationFailed, Scope.CLOUD, False),
    ("list", instead(410, "moved"), UnexpectedAnswer, Scope.OFFER, True),
    ("list", HTML, UnexpectedAnswer, Scope.OFFER, True),
    ("list", EMPTY, UnexpectedAnswer, Scope.OFFER, True),
    ("list", instead(200, {"virtual_machines": []}), UnexpectedAnswer, Scope.OFFER, True),
    ("list", instead(200, [None]), UnexpectedAnswer, Scope.OFFER, True),
    ("list", instead(200, [{"description": "gf1-x"}]), UnexpectedAnswer, Scope.OFFER, True),
    # one machine
    ("get", instead(403, "Forbidden"), AuthenticationFailed, Scope.CLOUD, False),
    ("get", instead(404, "Not Found"), UnexpectedAnswer, Scope.OFFER, True),
    ("get", HTML, UnexpectedAnswer, Scope.OFFER, True),
    ("delete", instead(403, "Forbidden"), AuthenticationFailed, Scope.CLOUD, False),
    ("delete", instead(500, "Internal Server Error"), CloudUnreachable, Scope.OFFER, True),
    # what is available
    ("available", instead(404, "Not Found"), AuthenticationFailed, Scope.CLOUD, False),
    ("available", HTML, UnexpectedAnswer, Scope.OFFER, True),
    ("available", instead(200, {}), UnexpectedAnswer, Scope.OFFER, True),
    ("available", instead(200, [{"Quantity": 1}]), UnexpectedAnswer, Scope.OFFER, False),
]


@pytest.mark.parametrize(("operation", "fault", "error", "scope", "ambiguous"), TOLD)
def test_what_hot_aisle_says_means(
    emulator: HotAisleEmulator,
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
        "available": lambda: cloud.offers(QUERY),
    }
    emulator.fault(operation, fault)
    with pytest.raises(CloudError) as told:
        calls[operation]()
    assert type(told.value) is error
    assert (told.value.scope, told.value.ambiguous) == (scope, ambiguous)
    assert KEY not in f"{told.value} {told.value.answer}"
    assert emulator.calls["create"] <= 2, "a create is never repeated"
    cloud.destroy(box)


# Offers


def test_offers_are_whole_machines_in_dollars_with_their_least_charge(cloud: Cloud) -> None:
    found = {o.gpu_count: o for o in cloud.offers(QUERY)}
    assert sorted(found) == [1, 2, 4], "machines without cards are left out"
    two = found[2]
    assert (two.gpu, two.vram_gb, two.usd_per_hour, two.stock, two.minimum_minutes) == (
        "MI300X",
        192,
        3.98,
        3,
        120,
    )
    assert found[4].unavailable == "none in stock"
    assert {o.region for o in found.values()} == {""}


def test_a_kind_of_machine_without_a_price_is_no_bargain(emulator: HotAisleEmulator, cloud: Cloud) -> None:
    del emulator.types[0]["OnDemandPrice"]
    assert [o.unavailable for o in cloud.offers(QUERY) if o.gpu_count == 1] == ["its price is not told"]


# Create


def test_the_specs_are_sent_back_as_they_were_listed(emulator: HotAisleEmulator, cloud: Cloud) -> None:
    box = rent(cloud)
    (sent,) = [r.body for r in emulator.requests if r.method == "POST" and "virtual_machines" in r.path]
    assert sent == emulator.types[0]["Specs"]
    cloud.destroy(box)


def test_a_create_is_waited_for_as_long_as_it_may_take(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    original = HttpApi.call

    def call(self: HttpApi, method: str, path: str, **options: Any) -> Any:
        if method == "POST" and path.endswith("virtual_machines/"):
            waited.append(options["timeout_s"])
        return original(self, method, path, **options)

    monkeypatch.setattr(HttpApi, "call", call)
    cloud.destroy(rent(cloud))
    assert waited == [330]
    assert cloud.capabilities.lag_s >= 330


def test_what_a_machine_cannot_have_is_refused_before_anything_is_sent(
    emulator: HotAisleEmulator, cloud: Cloud
) -> None:
    offer = offers(cloud)[0]
    sent = len(emulator.requests)
    for odd in (spec(image="rocm/pytorch"), spec(env={"A": "1"})):
        with pytest.raises(NotOffered):
            cloud.create(offer, odd)
    with pytest.raises(RequestRefused):
        cloud.create(replace(offer, instance_type="another"), spec())
    assert len(emulator.requests) == sent


def test_a_key_that_is_there_is_not_added_again(
    emulator: HotAisleEmulator, cloud: Cloud, tmp_path: Path
) -> None:
    cloud.destroy(rent(cloud))
    other = open_cloud("hotaisle", api_key=KEY, team=TEAM, base_url=emulator.base_url, state=str(tmp_path))
    emulator.fault("keys", instead(200, []))  # and once it is added between the look and the call
    other.destroy(rent(other))
    other.destroy(rent(other))
    assert len(emulator.keys) == 1
    assert emulator.calls["add_key"] == 2


@pytest.mark.parametrize("operation", ["keys", "add_key"])
def test_a_key_that_cannot_be_added_leaves_no_machine_open(
    emulator: HotAisleEmulator, cloud: Cloud, operation: str
) -> None:
    emulator.fault(operation, *[instead(500, "Internal Server Error")] * 3)
    with pytest.raises(CloudUnreachable) as told:
        rent(cloud)
    assert not told.value.ambiguous
    assert emulator.calls["create"] == 0


def test_a_key_without_the_role_for_it_is_told(emulator: HotAisleEmulator, cloud: Cloud) -> None:
    emulator.fault("add_key", instead(403, "Forbidden - not a contact owner"))
    with pytest.raises(AuthenticationFailed, match="role owner of its user"):
        rent(cloud)


def test_the_name_is_written_once_more_where_the_machine_is_not_known_everywhere_yet(
    emulator: HotAisleEmulator, cloud: Cloud
) -> None:
    emulator.fault("describe", instead(404, "Not Found"), instead(500, "Internal Server Error"))
    box = rent(cloud)
    assert emulator.calls["describe"] == 3
    assert [b.id for b in cloud.find(box.name)] == [box.id]
    cloud.destroy(box)


def test_a_note_that_is_too_long_costs_the_note_and_not_the_name(
    emulator: HotAisleEmulator, cloud: Cloud
) -> None:
    emulator.longest_description = 70
    box = rent(cloud)
    assert [(b.id, b.created_at) for b in cloud.find(box.name)] == [(box.id, None)]
    cloud.destroy(box)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (instead(500, "Internal Server Error"), CloudUnreachable),
        (instead(403, "Forbidden: Permission denied"), AuthenticationFailed),
        (hang_up, CloudUnreachable),
    ],
)
def test_a_machine_that_cannot_be_named_is_told_by_its_id(
    emulator: HotAisleEmulator, cloud: Cloud, fault: Fault, code: type[CloudError]
) -> None:
    emulator.fault("describe", *[fault] * 3)
    with pytest.raises(code) as told:
        rent(cloud)
    (row,) = emulator.live()
    assert (told.value.box_ids, told.value.ambiguous) == ((row.id,), False)
    cloud.destroy(Box(cloud="hotaisle", id=row.id, name="", state=BoxState.STARTING))


@pytest.mark.parametrize("name", [box_name(), "Production web server", "my {} box", ""])
def test_what_is_written_into_a_description_is_read_back(name: str) -> None:
    note = {"owner": '["airflow","a b","ü"]', "minimum_minutes": 60}
    assert name_in(name) == (name, {})
    if " " not in name and name:
        assert name_in(description_of(name, note)) == (name, note)
        assert name_in(description_of(name, {"owner": "x" * 5000})) == (name, {})
    assert name_in(None) == name_in("  ") == ("", {})


def test_a_turn_that_never_comes_is_an_error_and_a_folder_that_cannot_be_made_too(
    tmp_path: Path, clock: FakeClock
) -> None:
    path = tmp_path / "team.lock"
    with (
        turn_at(path, timeout_s=1, clock=clock),
        pytest.raises(RateLimited, match="has not ended within 900 s"),
        turn_at(path, timeout_s=900, clock=clock),
    ):
        raise AssertionError("two at once")
    with turn_at(path, timeout_s=1, clock=clock):
        pass
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(NotOffered, match="GPU_FLOWS_HOME"),
        turn_at(tmp_path / "file" / "x", timeout_s=1, clock=clock),
    ):
        raise AssertionError("no file, no turn")


# Describe and destroy


def test_a_wrong_team_is_never_taken_for_a_machine_that_is_gone(
    emulator: HotAisleEmulator, cloud: Cloud
) -> None:
    box = rent(cloud)
    wrong = open_cloud("hotaisle", api_key=KEY, team="acmee", base_url=emulator.base_url)
    with pytest.raises(AuthenticationFailed, match="HOTAISLE_TEAM is the handle"):
        wrong.describe(box)
    cloud.destroy(box)


def test_a_machine_whose_state_cannot_be_read_exists_all_the_same(
    emulator: HotAisleEmulator, cloud: Cloud
) -> None:
    box = rent(cloud)
    emulator.fault("state", instead(500, "the host is down"), instead(404, "Not Found"), HTML)
    for _ in range(3):
        (found,) = cloud.find("gf1-")
        assert (found.id, found.state) == (box.id, BoxState.STARTING)
        assert found.state_reason.startswith("its state cannot be read")
    cloud.destroy(box)


def test_a_delete_is_forced_and_not_waited_for(
    emulator: HotAisleEmulator, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "_DELETE_TIMEOUT_S", 0.2)
    box = rent(cloud)
    emulator.fault("delete", stall_after)
    cloud.destroy(box)
    assert cloud.describe(box).state is BoxState.GONE
    assert [r.query for r in emulator.requests if r.method == "DELETE"] == [{"force": "true"}]


# Credentials


def test_without_credentials_the_first_call_says_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOTAISLE_API_KEY", "HOTAISLE_TEAM"):
        monkeypatch.delenv(name, raising=False)
    cloud = open_cloud("hotaisle@team_a")
    with pytest.raises(AuthenticationFailed, match="HOTAISLE_TEAM__TEAM_A"):
        cloud.offers(QUERY)
    with pytest.raises(AuthenticationFailed, match="HOTAISLE_API_KEY__TEAM_A"):
        cloud.identity_secrets()
    monkeypatch.setenv("HOTAISLE_TEAM__TEAM_A", TEAM)
    with pytest.raises(AuthenticationFailed, match="HOTAISLE_API_KEY__TEAM_A"):
        cloud.find("gf1-")
    monkeypatch.setenv("HOTAISLE_API_KEY__TEAM_A", "new")
    monkeypatch.setenv("HOTAISLE_API_KEY__TEAM_A_PREVIOUS", "old")
    assert cloud.identity_secrets() == (b"new", b"old")


# What a lease makes of it


def test_a_machine_that_cannot_end_its_own_billing_has_to_be_allowed(cloud: Cloud, desk: Desk) -> None:
    with pytest.raises(ProvisionError, match="allow_unreaped=True"):
        desk.provisioner().provision(desk.lease(), desk.terms(offers(cloud)))


def test_c01_a_machine_that_cannot_be_named_is_ended_and_the_first_error_is_told(
    emulator: HotAisleEmulator, cloud: Cloud, desk: Desk
) -> None:
    walk = offers(cloud)
    emulator.fault("describe", *[instead(403, "Forbidden: Permission denied")] * 3)
    with pytest.raises(ProvisionError) as told:
        provision(desk, walk)
    assert told.value.attempts[0].code == "AUTHENTICATION_FAILED"
    assert "could not be given its name" in told.value.attempts[0].reason
    assert [row.deletes for row in emulator.book.values()] == [1]


@pytest.mark.parametrize("status", [404, 401])
def test_what_is_not_available_leads_to_the_next_offer_or_cloud(
    emulator: HotAisleEmulator, cloud: Cloud, desk: Desk, status: int
) -> None:
    walk = offers(cloud)
    emulator.fault("create", instead(status, NONE if status == 404 else FULL))
    if status == 404:
        lease, attempts = provision(desk, walk)
        assert [attempt.code for attempt in attempts] == ["CAPACITY_UNAVAILABLE", "OK"]
        cloud.destroy(lease.boxes[0].box)
        return
    with pytest.raises(ProvisionError) as told:
        provision(desk, walk)
    assert [attempt.code for attempt in told.value.attempts] == ["QUOTA_EXCEEDED"] * 2
    assert emulator.calls["create"] == 1


@pytest.mark.parametrize("fault", [after(500, "Internal Server Error"), hang_up_after, after(200, "")])
@pytest.mark.parametrize("lag", [0, 3])
def test_c11_a_machine_that_was_born_without_a_name_is_suspected_and_not_touched(
    emulator: HotAisleEmulator, cloud: Cloud, desk: Desk, fault: Fault, lag: int
) -> None:
    stranger = emulator.foreign("")
    stranger.born_at_poll = -lag
    walk = offers(cloud)
    emulator.list_lag_polls = lag
    emulator.fault("create", fault)
    with pytest.raises(ProvisionError) as told:
        provision(desk, walk)
    (born,) = emulator.live()
    assert told.value.code == "SUSPECTED_LEAK"
    assert born.id in str(told.value)
    assert stranger.id not in str(told.value)
    assert sum(desk.clock.slept) >= 330
    assert emulator.calls["create"] == 1
    with pytest.raises(TeardownFailed, match=born.id):
        teardown(OWNER, NAMESPACE, [cloud], journal=desk.journal(), clock=desk.clock)
    assert (born.deletes, born.name) == (0, "")
    # A person has looked, and deletes it: from here on nothing is left.
    emulator.end(born)
    assert teardown(OWNER, NAMESPACE, [cloud], journal=desk.journal(), clock=desk.clock).ended == ()
    assert stranger.ended_at is None


def test_c11_a_500_without_a_machine_leads_to_the_next_offer(
    emulator: HotAisleEmulator, cloud: Cloud, desk: Desk
) -> None:
    emulator.foreign("")
    walk = offers(cloud)
    emulator.fault("create", instead(500, "Internal Server Error"))
    lease, attempts = provision(desk, walk)
    assert [attempt.code for attempt in attempts] == ["CLOUD_UNREACHABLE", "OK"]
    cloud.destroy(lease.boxes[0].box)


def test_c11_a_name_whose_answer_was_lost_is_ended_and_never_a_suspect(
    emulator: HotAisleEmulator, cloud: Cloud, desk: Desk
) -> None:
    walk = offers(cloud)[:1]
    emulator.fault("describe", *[hang_up_after] * 3)
    with pytest.raises(ProvisionError) as told:
        provision(desk, walk)
    assert told.value.code == "CLOUD_UNREACHABLE"
    assert [row.deletes for row in emulator.book.values()] == [1]
    assert desk.journal().unsettled() == []


def test_c03_a_teardown_in_another_process_finds_the_machine_by_its_description(
    emulator: HotAisleEmulator, cloud: Cloud, desk: Desk, tmp_path: Path
) -> None:
    lease, _ = provision(desk, offers(cloud))
    other = open_cloud("hotaisle", api_key=KEY, team=TEAM, base_url=emulator.base_url, clock=desk.clock)
    no_journal = Desk(clock=desk.clock, folder=tmp_path / "elsewhere").journal()
    report = teardown(OWNER, NAMESPACE, [other], journal=no_journal, clock=desk.clock)
    assert [ended.name for ended in report.ended] == [str(lease.boxes[0].name)]
    assert [ended.minimum_minutes for ended in report.ended] == [60]


@pytest.mark.parametrize("state", ["shut off", "crashed", "paused"])
def test_c09_a_machine_that_is_off_is_found_and_deleted(
    emulator: HotAisleEmulator, cloud: Cloud, desk: Desk, state: str
) -> None:
    lease, _ = provision(desk, offers(cloud))
    (row,) = emulator.live()
    row.state = state
    (found,) = cloud.find(lease.prefix)
    assert found.state in (BoxState.STOPPED, BoxState.FAILED)
    assert (found.state_reason, found.usd_per_hour) == (state, 1.99)
    teardown(OWNER, NAMESPACE, [cloud], journal=desk.journal(), clock=desk.clock)
    assert row.deletes == 1
