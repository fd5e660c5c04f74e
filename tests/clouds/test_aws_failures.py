"""AWS: what its failures mean, row by row, and what a lease makes of them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpu_flows.clouds.aws import AwsCloud
from gpu_flows.clouds.base import Box, BoxSpec, BoxState
from gpu_flows.clouds.errors import (
    AuthenticationFailed,
    BoxLost,
    CapacityUnavailable,
    CloudError,
    CloudUnreachable,
    NotOffered,
    QuotaExceeded,
    RateLimited,
    RequestRefused,
    Scope,
    UnexpectedAnswer,
)
from gpu_flows.gpus.request import GpuRequest
from gpu_flows.leases.lease import BoxName
from gpu_flows.leases.provision import ProvisionError
from gpu_flows.leases.teardown import teardown
from gpu_flows.offers import Offer, OfferQuery, Spot, match, rank
from tests.clouds.aws_account import opened, share_models
from tests.clouds.contract import box_name
from tests.clouds.ssh_client import PUBLIC_KEY
from tests.emulators.aws import KEY_ID, SECRET, AwsEmulator, refuse
from tests.emulators.clock import FakeClock
from tests.emulators.http import EMPTY, HTML, Fault, Reply, after, hang_up, hang_up_after, instead
from tests.leases.conftest import NAMESPACE, OWNER, Desk

H100 = OfferQuery(request=GpuRequest.parse("H100:8"))


@pytest.fixture(scope="module", autouse=True)
def _models() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        share_models(patch)
        yield


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[AwsEmulator, AwsCloud, Offer]]:
    """Open one account for all rows of the table: each leaves it as it was."""
    with AwsEmulator() as emulator:
        clock = FakeClock(datetime.now(UTC))
        cloud = opened(emulator, clock=clock, cache=str(tmp_path_factory.mktemp("cache")))
        yield emulator, cloud, whole_nodes(cloud)[0]
        assert not emulator.live()


@pytest.fixture
def emulator() -> Iterator[AwsEmulator]:
    with AwsEmulator() as emulator:
        yield emulator
        assert not emulator.live()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(datetime.now(UTC))


@pytest.fixture
def cloud(emulator: AwsEmulator, clock: FakeClock, tmp_path: Path) -> AwsCloud:
    return opened(emulator, clock=clock, cache=str(tmp_path / "cache"))


@pytest.fixture
def desk(tmp_path: Path, clock: FakeClock, cloud: AwsCloud) -> Desk:
    return Desk(clock=clock, folder=tmp_path / "journal", clouds=[cloud])  # type: ignore[list-item]


def spec(name: str | None = None, **changes: Any) -> BoxSpec:
    name = name or box_name()
    return BoxSpec(
        **{
            "name": name,
            "nonce": name.split("-")[5],
            "owner": '["cli","failures"]',
            "ssh_public_key": PUBLIC_KEY,
            "deadline": datetime(2027, 6, 1, tzinfo=UTC),
            **changes,
        }
    )


def whole_nodes(cloud: AwsCloud, query: OfferQuery = H100) -> list[Offer]:
    """Return what is worth walking for eight cards, best first."""
    return [offer for offer in rank(match(cloud.offers(query), query)) if offer.unavailable is None]


# What RunInstances says, as the table of facts has it: code, HTTP status, error, scope. None of these leaves
# open whether a box exists, however the status looks.
SAID = [
    # next zone or offer
    ("InsufficientInstanceCapacity", 500, CapacityUnavailable, Scope.OFFER),
    ("Unsupported", 400, NotOffered, Scope.OFFER),
    ("SpotMaxPriceTooLow", 400, CapacityUnavailable, Scope.OFFER),
    ("InsufficientFreeAddressesInSubnet", 400, CapacityUnavailable, Scope.ZONE),
    ("InsufficientHostCapacity", 500, CapacityUnavailable, Scope.OFFER),
    ("InsufficientReservedInstanceCapacity", 500, CapacityUnavailable, Scope.OFFER),
    ("UnfulfillableCapacity", 500, CapacityUnavailable, Scope.OFFER),
    # next region, or another bucket of the quota in this one
    ("VcpuLimitExceeded", 400, QuotaExceeded, Scope.FAMILY),
    ("MaxSpotInstanceCountExceeded", 400, QuotaExceeded, Scope.FAMILY),
    ("InstanceLimitExceeded", 400, QuotaExceeded, Scope.FAMILY),
    ("VolumeLimitExceeded", 400, QuotaExceeded, Scope.REGION),
    ("PendingVerification", 400, QuotaExceeded, Scope.REGION),
    ("OptInRequired", 403, NotOffered, Scope.REGION),
    # back off
    ("RequestLimitExceeded", 503, RateLimited, Scope.CALL),
    ("Throttling", 400, RateLimited, Scope.CALL),
    # fatal for the cloud
    ("AuthFailure", 401, AuthenticationFailed, Scope.CLOUD),
    ("InvalidClientTokenId", 403, AuthenticationFailed, Scope.CLOUD),
    ("SignatureDoesNotMatch", 403, AuthenticationFailed, Scope.CLOUD),
    ("ExpiredToken", 400, AuthenticationFailed, Scope.CLOUD),
    ("UnauthorizedOperation", 403, AuthenticationFailed, Scope.CLOUD),
    ("Blocked", 403, AuthenticationFailed, Scope.CLOUD),
    # fatal for the request
    ("InvalidParameterValue", 400, RequestRefused, Scope.REQUEST),
    ("InvalidAMIID.NotFound", 400, RequestRefused, Scope.REQUEST),
    ("InvalidKeyPair.NotFound", 400, RequestRefused, Scope.REQUEST),
    # the user's network
    ("InvalidGroup.NotFound", 400, RequestRefused, Scope.REGION),
    ("VPCIdNotSpecified", 400, RequestRefused, Scope.REGION),
    # variants with a suffix: the stem decides
    ("InsufficientInstanceCapacity.Zonal", 500, CapacityUnavailable, Scope.OFFER),
    ("VcpuLimitExceeded.P", 400, QuotaExceeded, Scope.FAMILY),
    ("InvalidAMIID.Unavailable", 400, RequestRefused, Scope.REQUEST),
    ("ThrottlingException", 400, RateLimited, Scope.CALL),
    ("RequestExpired", 400, AuthenticationFailed, Scope.CLOUD),
    # an earlier box of the same token
    ("IdempotentInstanceTerminated", 400, BoxLost, Scope.OFFER),
    # nobody knows: kept whole, and never taken for a lack of capacity
    ("SomethingQuiteNew", 400, RequestRefused, Scope.OFFER),
    ("SomethingQuiteNew", 403, AuthenticationFailed, Scope.CLOUD),
]


@pytest.mark.parametrize(("code", "status", "error", "scope"), SAID)
def test_what_a_refused_create_means(
    account: tuple[AwsEmulator, AwsCloud, Offer],
    code: str,
    status: int,
    error: type[CloudError],
    scope: Scope,
) -> None:
    emulator, cloud, offer = account
    before = emulator.calls["RunInstances"]
    emulator.fault("RunInstances", refuse(code, "these are its own words", status))
    with pytest.raises(CloudError) as told:
        cloud.create(offer, spec())
    assert type(told.value) is error
    assert (told.value.scope, told.value.ambiguous) == (scope, False)
    assert told.value.answer == f"{code}: these are its own words"
    assert emulator.calls["RunInstances"] == before + 1, "boto3 sends nothing again"


# Answers that leave open whether a box exists: fault, error.
OPEN: list[tuple[Fault, type[CloudError]]] = [
    (refuse("InternalError", "odd", 500), CloudUnreachable),
    (refuse("Unavailable", "busy", 503), CloudUnreachable),
    (instead(502, "<html>Bad gateway</html>"), CloudUnreachable),
    (instead(500, ""), CloudUnreachable),
    (hang_up, CloudUnreachable),
    (hang_up_after, CloudUnreachable),
    (after(500, "<html>"), CloudUnreachable),
    (HTML, UnexpectedAnswer),
    (EMPTY, UnexpectedAnswer),
    (after(200, ""), UnexpectedAnswer),
    (instead(200, {"success": False}), UnexpectedAnswer),
    (refuse("IdempotentParameterMismatch"), UnexpectedAnswer),
]


@pytest.mark.parametrize(("fault", "error"), OPEN)
def test_c11_an_open_create_is_settled_by_asking_again_with_the_same_token(
    account: tuple[AwsEmulator, AwsCloud, Offer], fault: Fault, error: type[CloudError]
) -> None:
    emulator, cloud, offer = account
    wanted = spec()
    emulator.fault("RunInstances", fault)
    with pytest.raises(CloudError) as told:
        cloud.create(offer, wanted)
    assert type(told.value) is error
    assert told.value.ambiguous
    box = cloud.create(offer, wanted)
    assert [row.id for row in emulator.live()] == [box.id], "one box, whether the first call made it or not"
    cloud.destroy(box)


def test_a_create_that_no_connection_was_made_for_made_nothing(
    account: tuple[AwsEmulator, AwsCloud, Offer], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, cloud, offer = account
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        client = cloud._api._client("ec2", offer.region)
        endpoint = client._endpoint
        monkeypatch.setattr(endpoint, "host", f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setattr(client.meta, "_endpoint_url", endpoint.host)
        ruler = client._ruleset_resolver
        monkeypatch.setattr(ruler, "construct_endpoint", _to(ruler.construct_endpoint, endpoint.host))
        with pytest.raises(CloudUnreachable) as told:
            cloud.create(offer, spec())
    assert (told.value.scope, told.value.ambiguous) == (Scope.REGION, False)


def _to(construct: Any, url: str) -> Any:
    return lambda *args, **kwargs: construct(*args, **kwargs)._replace(url=url)


# Listings that are none (C05), and what else a question may be answered.
ASKED: list[tuple[Fault, type[CloudError]]] = [
    (HTML, UnexpectedAnswer),
    (EMPTY, UnexpectedAnswer),
    (instead(200, {"success": False, "error": "deprecated_endpoint"}), UnexpectedAnswer),
    (instead(410, "<html>gone</html>"), UnexpectedAnswer),
    (lambda _: Reply(200, "<Other/>", {"Content-Type": "text/xml"}), UnexpectedAnswer),
    (refuse("UnauthorizedOperation", "no", 403), AuthenticationFailed),
    (refuse("ExpiredToken"), AuthenticationFailed),
    (refuse("InternalError", "odd", 500), CloudUnreachable),
    (refuse("RequestLimitExceeded", "slow down", 503), RateLimited),
    (hang_up, CloudUnreachable),
]


@pytest.mark.parametrize(("fault", "error"), ASKED)
def test_c05_what_is_no_listing_is_unknown_and_never_empty(
    account: tuple[AwsEmulator, AwsCloud, Offer], fault: Fault, error: type[CloudError]
) -> None:
    emulator, cloud, offer = account
    box = cloud.create(offer, spec())
    emulator.always["DescribeInstances"] = fault
    for ask in (lambda: cloud.find("gf1-"), lambda: cloud.describe(box)):
        with pytest.raises(CloudError) as told:
            ask()
        assert type(told.value) is error
    del emulator.always["DescribeInstances"]
    assert [each.id for each in cloud.find("gf1-")] == [box.id]
    cloud.destroy(box)


def test_one_region_that_does_not_answer_makes_the_listing_unknown(
    emulator: AwsEmulator, cloud: AwsCloud
) -> None:
    cloud.find("gf1-")
    emulator.always["DescribeInstances"] = lambda operation: operation()
    emulator.fault("DescribeInstances", refuse("UnauthorizedOperation", "with an explicit deny", 403))
    with pytest.raises(AuthenticationFailed, match=r"regions=\["):
        cloud.find("gf1-")


def test_a_question_is_asked_again_where_aws_is_busy(
    emulator: AwsEmulator, cloud: AwsCloud, clock: FakeClock
) -> None:
    emulator.fault("DescribeRegions", refuse("RequestLimitExceeded", "slow down", 503), hang_up)
    assert cloud.find("gf1-") == []
    assert emulator.calls["DescribeRegions"] == 3
    assert len(clock.slept) == 2


def test_c01_a_box_that_may_not_be_described_is_destroyed_and_the_refusal_told(
    emulator: AwsEmulator, cloud: AwsCloud, desk: Desk
) -> None:
    walk = whole_nodes(cloud)[:1]
    emulator.always["RunInstances"] = lambda operation: (
        emulator.denied.add("DescribeInstances"),
        operation(),
    )[1]
    with pytest.raises(ProvisionError) as told:
        provisioner(desk).provision(desk.lease(), desk.terms(walk))
    emulator.denied.clear()
    assert told.value.code == AuthenticationFailed.code
    assert "perform DescribeInstances" in str(told.value), "the original refusal is told"
    (row,) = emulator.book.values()
    assert row.deletes >= 1
    (attempt,) = told.value.attempts
    assert (attempt.box_ids, attempt.kept) == ((row.id,), ()), (
        "and its end is proven by what terminating answers"
    )


def test_c03_a_box_whose_maker_was_killed_is_found_by_its_owner_alone(
    emulator: AwsEmulator, cloud: AwsCloud, desk: Desk
) -> None:
    made = desk.clock.now().replace(microsecond=0)
    name = str(
        BoxName(
            namespace=NAMESPACE,
            lease=desk.lease().id,
            node=0,
            created=made,
            nonce="abcdefgh",
            deadline=made + timedelta(hours=1),
        )
    )
    emulator.fault("RunInstances", hang_up_after)
    with pytest.raises(CloudUnreachable):
        cloud.create(whole_nodes(cloud)[0], spec(name))
    assert len(emulator.live()) == 1
    another = opened(emulator, clock=desk.clock)
    report = teardown(OWNER, NAMESPACE, [another], journal=desk.journal(), clock=desk.clock)
    assert [each.name for each in report.ended] == [name]


@pytest.mark.parametrize("fault", [after(500, "<html>"), after(200, ""), hang_up_after])
def test_c11_a_create_that_fails_after_the_box_exists_is_adopted(
    emulator: AwsEmulator, cloud: AwsCloud, desk: Desk, fault: Fault
) -> None:
    emulator.fault("RunInstances", fault)
    lease, attempts = provisioner(desk).provision(desk.lease(), desk.terms(whole_nodes(cloud)))
    assert [row.id for row in emulator.live()] == [lease.boxes[0].box.id]
    assert [attempt.code for attempt in attempts] == ["OK"]
    cloud.destroy(lease.boxes[0].box)


def test_c11_a_listing_that_lags_behind_is_waited_for(
    emulator: AwsEmulator, cloud: AwsCloud, clock: FakeClock
) -> None:
    emulator.list_lag_polls = 3
    box = cloud.create(whole_nodes(cloud)[0], spec())
    assert cloud.describe(box).state is BoxState.STARTING, "so new a box is not gone, but not there yet"
    with pytest.raises(CloudUnreachable, match="does not know its new box"):
        cloud.destroy(box)
    for _ in range(3):
        cloud.describe(box)
    assert cloud.describe(box).state is BoxState.RUNNING
    cloud.destroy(box)
    assert cloud.describe(box).state is BoxState.GONE


def test_a_box_that_aws_has_forgotten_is_gone(cloud: AwsCloud, clock: FakeClock) -> None:
    young = Box(
        cloud="aws",
        id="i-0123456789abcdef0",
        name="",
        region="us-east-1",
        state=BoxState.RUNNING,
        created_at=clock.now(),
    )
    old = replace(young, created_at=clock.now() - timedelta(minutes=10))
    assert cloud.describe(young).state is BoxState.RUNNING
    assert cloud.describe(old).state is BoxState.GONE
    cloud.destroy(old)


def test_c13_a_box_that_is_taken_back_for_lack_of_capacity_is_followed_by_the_next_offer(
    emulator: AwsEmulator, cloud: AwsCloud, desk: Desk
) -> None:
    def take_back(operation: Any) -> Reply:
        reply: Reply = operation()
        box_id = next(iter(emulator.book))
        emulator.drive(box_id, "terminated", "Server.InsufficientInstanceCapacity", "Insufficient capacity")
        return reply

    emulator.fault("RunInstances", take_back)
    lease, attempts = provisioner(desk).provision(desk.lease(), desk.terms(whole_nodes(cloud)))
    assert [attempt.code for attempt in attempts] == ["BOX_LOST", "OK"]
    assert "Server.InsufficientInstanceCapacity" in attempts[0].reason
    assert [row.id for row in emulator.live()] == [lease.boxes[0].box.id]
    assert desk.checked == [lease.boxes[0].box.id], "nothing connects to a box without an address"
    cloud.destroy(lease.boxes[0].box)


def test_a_new_security_group_may_not_have_come_round_yet(
    emulator: AwsEmulator, cloud: AwsCloud, clock: FakeClock
) -> None:
    late = refuse("InvalidGroup.NotFound", "The security group does not exist")
    emulator.fault("AuthorizeSecurityGroupIngress", late, late)
    cloud.destroy(cloud.create(whole_nodes(cloud)[0], spec()))
    assert clock.slept == [1.0, 2.0]


def test_c15_failing_over_touches_only_what_it_has_created(
    emulator: AwsEmulator, cloud: AwsCloud, desk: Desk
) -> None:
    theirs = emulator.stranger("dev-1")
    emulator.always["RunInstances"] = refuse("InsufficientInstanceCapacity", "none", 500)
    with pytest.raises(ProvisionError) as told:
        provisioner(desk).provision(desk.lease(), desk.terms(whole_nodes(cloud)[:3]))
    assert told.value.code == CapacityUnavailable.code
    assert emulator.calls["TerminateInstances"] == 0
    assert theirs.ended_at is None


@pytest.mark.parametrize(("spot", "code"), [(Spot.NEVER, "L-417A185B"), (Spot.ONLY, "L-C4BD4855")])
def test_c17_a_region_without_quota_is_not_walked(
    emulator: AwsEmulator, cloud: AwsCloud, spot: Spot, code: str
) -> None:
    emulator.quotas = {("us-east-1", code): 0, ("us-east-2", code): 96}
    query = replace(H100, spot=spot)
    judged = [
        o
        for o in match(cloud.offers(query), query)
        if o.instance_type == "p5.48xlarge" and o.spot == bool(spot == Spot.ONLY)
    ]
    lacking = {o.region: o.unavailable for o in judged if o.unavailable}
    assert set(lacking) == {"us-east-1", "us-east-2"}
    assert f"the quota {code} in us-east-2 allows 96 vCPUs" in str(lacking["us-east-2"])
    assert len([o for o in judged if o.region == "us-east-1"]) == 1, "one row for the region, not one a zone"
    assert {o.region for o in judged if not o.unavailable} <= {"us-west-2", "eu-west-1"}


def test_c17_a_quota_that_may_not_be_read_is_told_once_for_all_zones_of_a_region(
    emulator: AwsEmulator, cloud: AwsCloud, desk: Desk
) -> None:
    emulator.denied.add("GetServiceQuota")
    emulator.quotas = {("us-east-1", "L-417A185B"): 0, ("us-east-2", "L-417A185B"): 0}
    walk = whole_nodes(cloud)
    assert len([o for o in walk if o.region == "us-east-1"]) > 1
    lease, attempts = provisioner(desk).provision(desk.lease(), desk.terms(walk))
    assert lease.boxes[0].box.region not in ("us-east-1", "us-east-2")
    refused = [a for a in attempts if a.code == QuotaExceeded.code and a.tried]
    assert sorted(a.region[:-1] for a in refused) == ["us-east-1", "us-east-2"], "one create a region"
    assert attempts[-1].code == "OK"
    cloud.destroy(lease.boxes[0].box)


def test_without_credentials_the_first_call_says_where_they_belong(
    emulator: AwsEmulator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    nobody = AwsCloud(base_url=emulator.url)
    for ask in (lambda: nobody.offers(H100), lambda: nobody.find("gf1-"), nobody.identity_secrets):
        with pytest.raises(AuthenticationFailed, match="AWS_ACCESS_KEY_ID") as told:
            ask()
        assert told.value.scope is Scope.CLOUD
    with pytest.raises(AuthenticationFailed, match="aws configure --profile team_a"):
        AwsCloud("team_a", base_url=emulator.url).find("gf1-")
    assert not emulator.requests


def test_a_wrong_key_is_told_without_the_secret(emulator: AwsEmulator) -> None:
    wrong = opened(emulator, access_key_id="AKIAWRONG", secret_access_key="another/invented/secret")
    with pytest.raises(AuthenticationFailed) as told:
        wrong.offers(H100)
    assert "another/invented" not in f"{told.value} {told.value.answer}"


def test_each_account_has_its_own_keys_and_remembers_the_one_before(
    emulator: AwsEmulator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "credentials"
    config.write_text(f"[team_a]\naws_access_key_id = {KEY_ID}\naws_secret_access_key = {SECRET}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(config))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY_PREVIOUS", "of another account")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY__TEAM_A_PREVIOUS", "before")
    team_a = AwsCloud("team_a", base_url=emulator.url)
    assert team_a.identity_secrets() == (SECRET.encode(), b"before")
    assert team_a.find("gf1-") == []
    monkeypatch.setenv("AWS_ACCESS_KEY_ID__TEAM_B", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY__TEAM_B", "b")
    assert AwsCloud("team_b").identity_secrets() == (b"b",)


def test_no_key_is_derived_from_credentials_that_run_out(emulator: AwsEmulator) -> None:
    assert opened(emulator, session_token="a-token").identity_secrets() == ()


def test_the_clock_of_aws_is_known_from_its_answers(tmp_path: Path) -> None:
    with AwsEmulator(skew_s=-900) as emulator:
        cloud = opened(emulator, cache=str(tmp_path))
        assert cloud.clock_skew_s() is None
        cloud.find("gf1-")
        assert cloud.clock_skew_s() == pytest.approx(-900, abs=5)


def provisioner(desk: Desk) -> Any:
    made = desk.provisioner()
    made.renting._public_key = lambda _: PUBLIC_KEY
    return made
