"""Every failure of Vast.ai that has been published or seen: what it means, how far it reaches, what may exist."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gpu_flows.clouds import open_cloud
from gpu_flows.clouds.base import Box, BoxSpec, BoxState
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
from gpu_flows.clouds.vastai import VastaiCloud
from gpu_flows.clouds.vastai.instances import box_of
from gpu_flows.gpus.request import GpuRequest
from gpu_flows.offers import OfferQuery, Spot
from tests.clouds.contract import box_name
from tests.clouds.ssh_client import PUBLIC_KEY
from tests.emulators.clock import FakeClock
from tests.emulators.http import EMPTY, HTML, Fault, after, hang_up, hang_up_after, instead
from tests.emulators.vastai import VastaiEmulator

KEY = "vast-invented-key"
QUERY = OfferQuery(request=GpuRequest.parse("H100:8"))


@pytest.fixture
def emulator() -> Iterator[VastaiEmulator]:
    with VastaiEmulator(api_key=KEY) as running:
        yield running


@pytest.fixture
def cloud(emulator: VastaiEmulator) -> VastaiCloud:
    return VastaiCloud(api_key=KEY, base_url=emulator.url, clock=FakeClock())


def spec(name: str | None = None, **changes: Any) -> BoxSpec:
    name = name or box_name()
    values = {
        "name": name,
        "nonce": name.split("-")[5],
        "owner": '["cli","test"]',
        "ssh_public_key": PUBLIC_KEY,
        "deadline": datetime.now(UTC) + timedelta(hours=1),
    }
    return BoxSpec(**{**values, **changes})


def refused(error: str, msg: str = "", **more: Any) -> dict[str, Any]:
    return {"success": False, "error": error, "msg": msg, **more}


@dataclass(frozen=True)
class Row:
    """One row of the table: the answer to a create, and what it means."""

    what: str
    status: int
    body: Any
    error: type[CloudError]
    scope: Scope
    ambiguous: bool


GONE_ASK = "error 404/3603: no_such_ask Instance type by id 1 is not available."
NOT_YOURS = "error 403/3586: Offer 1 is not your own. Hosts can only rent their own machines."
TOO_FREQUENT = {"detail": "API requests too frequent endpoint threshold=4.5"}
QUEUED = {"success": True, "msg": "state change queued"}

TABLE = [
    # The next offer may do.
    Row("taken, as published", 404, refused("invalid_args", GONE_ASK), CapacityUnavailable, Scope.OFFER, False),
    Row("taken meanwhile", 410, refused("no_such_ask", GONE_ASK), CapacityUnavailable, Scope.OFFER, False),
    Row("taken, as a 400", 400, refused("no_such_ask"), CapacityUnavailable, Scope.OFFER, False),
    Row("taken, as a success", 200, refused("no_such_ask"), CapacityUnavailable, Scope.OFFER, False),
    Row("the bid is too low", 400, refused("invalid_price"), CapacityUnavailable, Scope.OFFER, True),
    Row("invalid arguments", 400, refused("invalid_args", "error 400/3467"), RequestRefused, Scope.OFFER, False),
    Row("a VM without a key", 400, refused("no_ssh_key_for_vm"), RequestRefused, Scope.OFFER, False),
    # Nothing more from this account.
    Row("no credit", 400, refused("insufficient_credit", "add credit"), OutOfBalance, Scope.CLOUD, False),
    Row("a wrong key, as a 404", 404, refused("auth_error", "..."), AuthenticationFailed, Scope.CLOUD, False),
    Row("a wrong key, as published", 401, refused("auth_error", "..."), AuthenticationFailed, Scope.CLOUD, False),
    Row("a 401 without words", 401, None, AuthenticationFailed, Scope.CLOUD, False),
    Row("a key without the right", 403, refused("no_permission"), AuthenticationFailed, Scope.CLOUD, False),
    Row("a host's own account", 403, refused("invalid_args", NOT_YOURS), NotOffered, Scope.CLOUD, False),
    # Back off.
    Row("too many calls", 429, TOO_FREQUENT, RateLimited, Scope.CALL, False),
    Row("too many searches today", 429, refused("search_quota_exceeded"), QuotaExceeded, Scope.CLOUD, False),
    # Nobody knows: it has to be looked for.
    Row("500", 500, refused("server_error"), CloudUnreachable, Scope.OFFER, True),
    Row("502 from a proxy", 502, "<html>Bad Gateway</html>", CloudUnreachable, Scope.OFFER, True),
    Row("a 400 of an unknown kind", 400, refused("something_new"), RequestRefused, Scope.OFFER, True),
    Row("a 404 of an unknown kind", 404, refused("something_new"), UnexpectedAnswer, Scope.OFFER, True),
    Row("a failure that is a success", 200, refused("something_new"), UnexpectedAnswer, Scope.OFFER, True),
    Row("a success without an id", 200, QUEUED, UnexpectedAnswer, Scope.OFFER, True),
    Row("an id that is none", 200, {"success": True, "new_contract": "7000001"}, UnexpectedAnswer, Scope.OFFER, True),
    Row("a list", 200, [], UnexpectedAnswer, Scope.OFFER, True),
    Row("a login page", 200, "<!doctype html>", UnexpectedAnswer, Scope.OFFER, True),
    Row("nothing at all", 200, "", UnexpectedAnswer, Scope.OFFER, True),
]  # fmt: skip


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.what)
def test_what_a_failed_create_means(cloud: VastaiCloud, emulator: VastaiEmulator, row: Row) -> None:
    offer = cloud.offers(QUERY)[0]
    emulator.fault("create", instead(row.status, row.body))
    with pytest.raises(row.error) as failure:
        cloud.create(offer, spec())
    assert type(failure.value) is row.error
    assert (failure.value.scope, failure.value.ambiguous) == (row.scope, row.ambiguous)
    assert emulator.calls["create"] == 1, "a create is never sent twice"
    assert KEY not in str(failure.value)
    assert not emulator.live()


def test_c11_a_bid_that_is_too_low_is_an_error_with_a_box(
    cloud: VastaiCloud, emulator: VastaiEmulator
) -> None:
    """Facts, rule 1: error plus ``new_contract``; the stopped instance bills its disk."""
    offer = cloud.offers(replace(QUERY, spot=Spot.ONLY))[0]
    emulator.asks[0]["min_bid"] *= 2
    with pytest.raises(CapacityUnavailable) as failure:
        cloud.create(offer, spec(name := box_name()))
    (row,) = emulator.live()
    assert failure.value.ambiguous
    assert failure.value.box_ids == (row.id,)
    (box,) = cloud.find(name)
    assert (box.id, box.state) == (row.id, BoxState.STOPPED)
    cloud.destroy(box)
    assert not emulator.live()


@pytest.mark.parametrize(
    ("what", "fault", "exists"),
    [
        ("the connection is cut after it", hang_up_after, True),
        ("the connection is cut before it", hang_up, False),
        ("a 500 after it", after(500, refused("server_error")), True),
        ("nonsense after it", after(200, "<html>"), True),
        ("an unknown refusal after it", after(400, refused("something_new")), True),
        ("an empty answer after it", after(200, None), True),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_c11_after_an_ambiguous_create_the_box_is_found_by_its_name(
    cloud: VastaiCloud, emulator: VastaiEmulator, what: str, fault: Fault, exists: bool
) -> None:
    offer = cloud.offers(QUERY)[0]
    emulator.fault("create", fault)
    with pytest.raises(CloudError) as failure:
        cloud.create(offer, spec(name := box_name()))
    assert failure.value.ambiguous
    found = cloud.find(name)
    assert [box.name for box in found] == [name] * exists
    for box in found:
        cloud.destroy(box)
    assert not emulator.live()


def test_a_cloud_that_cannot_be_reached_has_made_nothing(emulator: VastaiEmulator) -> None:
    offer = VastaiCloud(api_key=KEY, base_url=emulator.url).offers(QUERY)[0]
    nowhere = VastaiCloud(api_key=KEY, base_url="http://127.0.0.1:9", clock=FakeClock())
    with pytest.raises(CloudUnreachable) as failure:
        nowhere.create(offer, spec())
    assert not failure.value.ambiguous


def test_the_key_of_an_instance_is_in_no_error(cloud: VastaiCloud, emulator: VastaiEmulator) -> None:
    offer = cloud.offers(QUERY)[0]
    emulator.fault(
        "create", instead(200, {"success": False, "new_contract": 7, "instance_api_key": "s3cret"})
    )
    with pytest.raises(UnexpectedAnswer) as failure:
        cloud.create(offer, spec())
    assert failure.value.box_ids == ("7",)
    assert "s3cret" not in f"{failure.value} {failure.value.answer}"


# Listings


C05 = {
    "a retired endpoint": instead(200, refused("deprecated_endpoint")),
    "410": instead(410, refused("deprecated_endpoint")),
    "an empty body": EMPTY,
    "a login page": HTML,
    "a list without its field": instead(200, {"success": True}),
    "null for a list": instead(200, {"success": True, "instances": None}),
    "an object for a list": instead(200, {"success": True, "instances": {"id": 1}}),
    "rows that are none": instead(200, {"success": True, "instances": ["7000001"]}),
    "rows without an id": instead(200, {"success": True, "instances": [{"label": "x"}]}),
    "fewer than are counted": instead(200, {"success": True, "instances": [], "total_instances": 2}),
    "a token that is none": instead(200, {"success": True, "instances": [], "next_token": 7}),
}


@pytest.mark.parametrize("what", C05)
def test_c05_what_is_no_listing_is_unknown_and_never_empty(
    cloud: VastaiCloud, emulator: VastaiEmulator, what: str
) -> None:
    cloud.create(cloud.offers(QUERY)[0], spec())
    emulator.fault("list", C05[what])
    with pytest.raises(UnexpectedAnswer):
        cloud.find("gf1-")
    assert len(cloud.find("gf1-")) == 1


def test_c05_a_listing_that_goes_in_circles_is_no_listing(
    cloud: VastaiCloud, emulator: VastaiEmulator
) -> None:
    emulator.fault("list", *[instead(200, {"success": True, "instances": [], "next_token": "again"})] * 3)
    with pytest.raises(UnexpectedAnswer, match="does not end"):
        cloud.find("gf1-")


def test_the_old_listing_is_never_asked(cloud: VastaiCloud, emulator: VastaiEmulator) -> None:
    cloud.find("gf1-")
    assert emulator.calls["old_list"] == 0


def test_every_page_of_the_listing_is_read(cloud: VastaiCloud, emulator: VastaiEmulator) -> None:
    emulator.page_boxes = 3
    offer = cloud.offers(QUERY)[0]
    names = {cloud.create(offer, spec()).name for _ in range(7)}
    emulator.foreign("theirs")
    emulator.calls.clear()
    assert {box.name for box in cloud.find("gf1-")} == names
    assert emulator.calls["list"] == 3


def test_a_listing_that_is_too_busy_is_asked_again(cloud: VastaiCloud, emulator: VastaiEmulator) -> None:
    emulator.fault("list", instead(429, {"detail": "too frequent"}), instead(502, "<html>"))
    assert cloud.find("gf1-") == []
    assert emulator.calls["list"] == 3


# One instance


@pytest.mark.parametrize(
    "body", [{"instances": None}, {"instances": {}}, {"instances": []}], ids=["null", "object", "list"]
)
def test_an_instance_that_is_null_or_empty_is_gone(
    cloud: VastaiCloud, emulator: VastaiEmulator, body: Any
) -> None:
    box = cloud.create(cloud.offers(QUERY)[0], spec())
    emulator.fault("show", instead(200, body))
    assert cloud.describe(box).state is BoxState.GONE


@pytest.mark.parametrize(
    ("what", "fault", "error"),
    [
        ("an answer without the field", instead(200, {}), UnexpectedAnswer),
        ("a failure that is a success", instead(200, refused("x")), UnexpectedAnswer),
        ("another instance", instead(200, {"instances": {"id": 1}}), UnexpectedAnswer),
        ("a 404 of another kind", instead(404, {"detail": "no route"}), UnexpectedAnswer),
        ("a 404 of a proxy", instead(404, "<html>"), UnexpectedAnswer),
        ("a login page", HTML, UnexpectedAnswer),
        ("a wrong key", instead(404, refused("auth_error")), AuthenticationFailed),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_odd_answer_does_not_make_a_box_gone(
    cloud: VastaiCloud, emulator: VastaiEmulator, what: str, fault: Fault, error: type[CloudError]
) -> None:
    box = cloud.create(cloud.offers(QUERY)[0], spec())
    emulator.fault("show", fault)
    with pytest.raises(error):
        cloud.describe(box)


@pytest.mark.parametrize("status", ["no_such_instance", "not_found"])
def test_a_404_that_says_so_is_gone(cloud: VastaiCloud, emulator: VastaiEmulator, status: str) -> None:
    box = cloud.create(cloud.offers(QUERY)[0], spec())
    emulator.fault("show", instead(404, refused(status)))
    assert cloud.describe(box).state is BoxState.GONE


@pytest.mark.parametrize(
    ("what", "fault", "error"),
    [
        ("a wrong key, as a 404", instead(404, refused("auth_error")), AuthenticationFailed),
        ("a failure that is a success", instead(200, refused("busy")), UnexpectedAnswer),
        ("a login page", HTML, UnexpectedAnswer),
        ("a 404 of a proxy", instead(404, "<html>"), UnexpectedAnswer),
        ("too many calls", instead(429, refused("rate_limit_exceeded")), RateLimited),
        ("500", instead(500, None), CloudUnreachable),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_delete_that_did_not_work_is_an_error(
    cloud: VastaiCloud, emulator: VastaiEmulator, what: str, fault: Fault, error: type[CloudError]
) -> None:
    box = cloud.create(cloud.offers(QUERY)[0], spec())
    emulator.fault("destroy", fault)
    with pytest.raises(error):
        cloud.destroy(box)
    assert emulator.live()


@pytest.mark.parametrize("forged", ["", "1/../2", "7000001?x", "abc", "-1"])
def test_c03_only_an_id_is_ever_sent(cloud: VastaiCloud, emulator: VastaiEmulator, forged: str) -> None:
    box = replace(Box(cloud="vastai", id="1", name="", state=BoxState.RUNNING))
    object.__setattr__(box, "id", forged)
    for call in (cloud.describe, cloud.destroy):
        with pytest.raises(RequestRefused):
            call(box)
    assert emulator.requests == []


# States


@pytest.mark.parametrize(
    ("status", "more", "state", "reason"),
    [
        (None, {}, BoxState.STARTING, ""),
        ("created", {}, BoxState.STARTING, ""),
        ("loading", {"status_msg": "pulling layers"}, BoxState.STARTING, "pulling layers"),
        ("rebooting", {}, BoxState.STARTING, ""),
        ("running", {}, BoxState.RUNNING, ""),
        ("frozen", {}, BoxState.STOPPED, ""),
        ("stopped", {}, BoxState.STOPPED, ""),
        ("exited", {}, BoxState.FAILED, "Vast.ai calls it exited"),
        ("unknown", {}, BoxState.FAILED, "Vast.ai calls it unknown"),
        ("offline", {}, BoxState.FAILED, "Vast.ai calls it offline"),
        ("loading", {"status_msg": "Error: OCI runtime create failed: x"}, BoxState.FAILED, "OCI runtime create"),
        (None, {"status_msg": "manifest unknown"}, BoxState.FAILED, "manifest unknown"),
        ("loading", {"status_msg": "pull access denied for x"}, BoxState.FAILED, "pull access denied"),
        ("exited", {"wanted": "stopped", "is_bid": True}, BoxState.STOPPED, "outbid"),
        ("running", {"wanted": "stopped", "is_bid": True}, BoxState.STOPPED, "outbid"),
        (None, {"wanted": "stopped"}, BoxState.STOPPED, "credit"),
        ("levitating", {}, BoxState.STARTING, "levitating"),
    ],
)  # fmt: skip
def test_the_state_of_an_instance(
    status: str | None, more: dict[str, Any], state: BoxState, reason: str
) -> None:
    wanted = more.pop("wanted", "running")
    row = {
        "id": 1,
        "actual_status": status,
        "cur_state": wanted,
        "next_state": wanted,
        "intended_status": wanted,
    }
    box = box_of({**row, **more}, "default")
    assert box.state is state
    assert reason in box.state_reason


@pytest.mark.parametrize(
    ("row", "host", "port"),
    [
        # As hosts report it, with blanks around it.
        ({"public_ipaddr": " 203.0.113.9\n", "ports": {"22/tcp": [{"HostPort": "40022"}]}}, "203.0.113.9", 40022),
        ({"public_ipaddr": "203.0.113.9", "ports": {}}, "ssh4.vast.ai", 10600),
        ({"public_ipaddr": "203.0.113.9", "ports": None}, "ssh4.vast.ai", 10600),
        ({"public_ipaddr": "203.0.113.9", "ports": {"22/tcp": []}}, "ssh4.vast.ai", 10600),
        ({"public_ipaddr": "", "ports": {"22/tcp": [{"HostPort": "1"}]}}, "ssh4.vast.ai", 10600),
    ],
)  # fmt: skip
def test_ssh_goes_to_the_host_itself_or_else_by_the_proxy(row: dict[str, Any], host: str, port: int) -> None:
    proxy = {"ssh_host": "ssh4.vast.ai", "ssh_port": 10600}
    box = box_of({"id": 1, "actual_status": "running", **proxy, **row}, "default")
    assert box.endpoint is not None
    assert (box.endpoint.host, box.endpoint.port, box.endpoint.username) == (host, port, "root")


def test_c13_a_running_instance_without_an_address_has_no_endpoint() -> None:
    assert (
        box_of({"id": 1, "actual_status": "running", "ssh_host": "", "ports": None}, "default").endpoint
        is None
    )
    starting = {"id": 1, "actual_status": "loading", "ssh_host": "ssh4.vast.ai", "ssh_port": 10600}
    assert box_of(starting, "default").endpoint is None


def test_c09_c53_an_outbid_box_still_bills_and_goes(cloud: VastaiCloud, emulator: VastaiEmulator) -> None:
    offer = cloud.offers(replace(QUERY, spot=Spot.ONLY))[0]
    box = cloud.create(offer, spec())
    emulator.outbid(box.id)
    now = cloud.describe(box)
    assert (now.state, now.spot) == (BoxState.STOPPED, True)
    assert "outbid" in now.state_reason
    assert not now.state.may_serve
    assert [each.id for each in cloud.find(box.name)] == [box.id]
    cloud.destroy(now)
    assert cloud.describe(box).state is BoxState.GONE
    assert not emulator.live()


# Keys


def test_without_a_key_the_first_call_says_so_and_nothing_is_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, emulator: VastaiEmulator
) -> None:
    for variable in ("VAST_API_KEY", "VAST_API_KEY__TEAM_A"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for account, variable in (("default", "VAST_API_KEY"), ("team_a", "VAST_API_KEY__TEAM_A")):
        cloud = VastaiCloud(account, base_url=emulator.url)
        for call in (lambda c=cloud: c.offers(QUERY), lambda c=cloud: c.find("gf1-"), cloud.identity_secrets):
            with pytest.raises(AuthenticationFailed, match=variable):
                call()
    assert emulator.requests == []


def test_the_key_comes_from_the_variable_or_the_vendors_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.delenv("VAST_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("VAST_API_KEY__TEAM_A", "of-team-a")
    monkeypatch.setenv("VAST_API_KEY__TEAM_A_PREVIOUS", "older")
    (tmp_path / ".vast_api_key").write_text("legacy\n")
    assert open_cloud("vast").identity_secrets() == (b"legacy",)
    (tmp_path / "config" / "vastai").mkdir(parents=True)
    (tmp_path / "config" / "vastai" / "vast_api_key").write_text("filed\n")
    assert open_cloud("vastai").identity_secrets() == (b"filed",)
    monkeypatch.setenv("VAST_API_KEY", "in-the-variable")
    assert open_cloud("vastai").identity_secrets() == (b"in-the-variable",)
    assert open_cloud("vastai@team_a").identity_secrets() == (b"of-team-a", b"older")


@pytest.mark.parametrize("status", [401, 404])
def test_a_wrong_key_is_told_apart_from_nothing_there(emulator: VastaiEmulator, status: int) -> None:
    emulator.auth_status = status
    cloud = VastaiCloud(api_key="wrong-key", base_url=emulator.url, clock=FakeClock())
    box = Box(cloud="vastai", id="7000001", name="", state=BoxState.RUNNING)
    calls = (
        lambda: cloud.offers(QUERY),
        lambda: cloud.find("gf1-"),
        lambda: cloud.describe(box),
        lambda: cloud.destroy(box),
    )
    for call in calls:
        with pytest.raises(AuthenticationFailed) as failure:
            call()
        assert failure.value.scope is Scope.CLOUD
        assert "wrong-key" not in str(failure.value)


def test_the_cloud_keeps_its_own_time(emulator: VastaiEmulator) -> None:
    emulator.skew_s = 900
    cloud = VastaiCloud(api_key=KEY, base_url=emulator.url)
    assert cloud.clock_skew_s() is None
    cloud.find("gf1-")
    skew_s = cloud.clock_skew_s()
    assert skew_s is not None
    assert skew_s == pytest.approx(900, abs=2)


def test_no_key_is_in_a_path_a_query_or_a_body(cloud: VastaiCloud, emulator: VastaiEmulator) -> None:
    box = cloud.create(cloud.offers(QUERY)[0], spec(boot_script=cloud.self_destruct(spec()) or ""))
    cloud.find("gf1-")
    cloud.describe(box)
    cloud.destroy(box)
    for request in emulator.requests:
        assert KEY not in f"{request.path} {dict(request.query)} {json.dumps(request.body)}"
        assert "gpu-flows" in request.headers["user-agent"]
