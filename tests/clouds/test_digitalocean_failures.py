"""Each failure of DigitalOcean that was seen or is published, its offers, and what a lease makes of them."""

from __future__ import annotations

import socket
import sys
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
    QuotaExceeded,
    RateLimited,
    RequestRefused,
    Scope,
    UnexpectedAnswer,
)
from gpu_flows.errors import MissingExtra
from gpu_flows.gpus.request import GpuRequest
from gpu_flows.leases.provision import ProvisionError
from gpu_flows.leases.teardown import teardown
from gpu_flows.offers import Offer, OfferQuery, match, rank
from tests.clouds.contract import box_name
from tests.clouds.ssh_client import PUBLIC_KEY
from tests.emulators.clock import FakeClock
from tests.emulators.digitalocean import NOT_FOUND, TOKEN, DigitalOceanEmulator, refusal
from tests.emulators.http import EMPTY, HTML, Fault, after, hang_up, hang_up_after, instead
from tests.leases.conftest import NAMESPACE, OWNER, Desk


def asking(request: str | list[str], **wanted: Any) -> OfferQuery:
    return OfferQuery(request=GpuRequest.parse(request), **wanted)


H100 = asking("H100:8")


@pytest.fixture
def emulator() -> Iterator[DigitalOceanEmulator]:
    with DigitalOceanEmulator() as emulator:
        yield emulator
        assert not emulator.live()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(datetime.now(UTC))


@pytest.fixture
def cloud(emulator: DigitalOceanEmulator, clock: FakeClock) -> Cloud:
    return open_cloud("digitalocean", token=TOKEN, base_url=emulator.url, clock=clock)


@pytest.fixture
def desk(tmp_path: Path, clock: FakeClock, cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> Desk:
    desk = Desk(clock=clock, folder=tmp_path / "journal", clouds=[cloud])  # type: ignore[list-item]
    provisioner = desk.provisioner

    def with_a_key() -> Any:
        made = provisioner()
        made.renting._public_key = lambda _: PUBLIC_KEY
        return made

    monkeypatch.setattr(desk, "provisioner", with_a_key)
    return desk


def unprocessable(message: str, **attributes: Any) -> Fault:
    return instead(422, refusal(message, **attributes))


def problem(status: int, code: str, message: str) -> Fault:
    return instead(status, {"id": code, "message": message})


def offers(cloud: Cloud, query: OfferQuery = H100) -> list[Offer]:
    return [offer for offer in rank(match(cloud.offers(query), query)) if offer.unavailable is None]


def spec(**changes: Any) -> BoxSpec:
    base = BoxSpec(
        name=box_name(),
        nonce="n",
        owner='["cli"]',
        ssh_public_key=PUBLIC_KEY,
        deadline=datetime.now(UTC) + timedelta(hours=1),
    )
    return replace(base, **changes)


def rent(cloud: Cloud, query: OfferQuery = H100, **changes: Any) -> Box:
    return cloud.create(offers(cloud, query)[0], spec(**changes))


NO_SERVERS = "The size you selected is temporarily unavailable because of GPU server capacity"
LIMIT = "creating this/these droplet(s) will exceed your droplet limit"
INVALID = "You specified an invalid {} for Droplet creation."
NO_KEYS = "[7] are invalid key identifiers for Droplet creation."

TOLD = [
    # create: next offer or region
    ("create", unprocessable("Size is not available in this region."), CapacityUnavailable, Scope.OFFER, False),
    ("create", unprocessable("Region is not available"), CapacityUnavailable, Scope.REGION, False),
    ("create", unprocessable("This size is unavailable"), CapacityUnavailable, Scope.OFFER, False),
    ("create", unprocessable(NO_SERVERS), CapacityUnavailable, Scope.OFFER, False),
    # create: fatal for the cloud
    ("create", unprocessable(LIMIT), QuotaExceeded, Scope.CLOUD, False),
    ("create", problem(401, "Unauthorized", "Unable to authenticate you"), AuthenticationFailed, Scope.CLOUD, False),
    ("create", problem(403, "Forbidden", "You are not authorized"), AuthenticationFailed, Scope.CLOUD, False),
    # create: fatal for the request
    ("create", unprocessable(INVALID.format("size")), RequestRefused, Scope.REQUEST, False),
    ("create", unprocessable(INVALID.format("region")), RequestRefused, Scope.REQUEST, False),
    ("create", unprocessable(INVALID.format("image")), RequestRefused, Scope.REQUEST, False),
    ("create", unprocessable(NO_KEYS), RequestRefused, Scope.REQUEST, False),
    ("create", unprocessable("Something new is wrong"), RequestRefused, Scope.OFFER, False),
    # create: back off, or look for the box
    ("create", problem(429, "too_many_requests", "API rate limit exceeded"), RateLimited, Scope.CALL, False),
    ("create", problem(500, "server_error", "Unexpected server-side error"), CloudUnreachable, Scope.OFFER, True),
    ("create", instead(503, "<html>Service unavailable</html>"), CloudUnreachable, Scope.OFFER, True),
    ("create", instead(504, "<html>Gateway timeout</html>"), CloudUnreachable, Scope.OFFER, True),
    ("create", hang_up, CloudUnreachable, Scope.OFFER, True),
    ("create", instead(202, "<!doctype html><title>Log in</title>"), UnexpectedAnswer, Scope.OFFER, True),
    ("create", instead(202, ""), UnexpectedAnswer, Scope.OFFER, True),
    ("create", instead(202, {"droplet": {"id": 1}}), UnexpectedAnswer, Scope.OFFER, True),
    ("create", instead(200, {"droplets": []}), UnexpectedAnswer, Scope.OFFER, True),
    ("create", problem(409, "conflict", "odd"), UnexpectedAnswer, Scope.OFFER, True),
    ("create", instead(302, "", Location="https://else.invalid/"), UnexpectedAnswer, Scope.OFFER, True),
    # the listing
    ("list", problem(401, "Unauthorized", "Unable to authenticate you"), AuthenticationFailed, Scope.CLOUD, False),
    ("list", problem(410, "gone", "moved"), UnexpectedAnswer, Scope.OFFER, True),
    ("list", HTML, UnexpectedAnswer, Scope.OFFER, True),
    ("list", EMPTY, UnexpectedAnswer, Scope.OFFER, True),
    ("list", instead(200, []), UnexpectedAnswer, Scope.OFFER, True),
    ("list", instead(200, {"droplets": {}}), UnexpectedAnswer, Scope.OFFER, True),
    ("list", instead(200, {"droplets": [None]}), UnexpectedAnswer, Scope.OFFER, True),
    ("list", instead(200, {"droplets": [{"id": 1, "name": "gf1-x"}]}), UnexpectedAnswer, Scope.OFFER, True),
    # one droplet
    ("get", problem(403, "Forbidden", "You are not authorized"), AuthenticationFailed, Scope.CLOUD, False),
    ("get", HTML, UnexpectedAnswer, Scope.OFFER, True),
    ("get", instead(404, "<html>no such page</html>"), UnexpectedAnswer, Scope.OFFER, True),
    ("get", instead(404, {"error": "no route"}), UnexpectedAnswer, Scope.OFFER, True),
    ("delete", problem(500, "server_error", "odd"), CloudUnreachable, Scope.OFFER, True),
    ("delete", instead(404, "<html>no such page</html>"), UnexpectedAnswer, Scope.OFFER, True),
    # the sizes
    ("sizes", HTML, UnexpectedAnswer, Scope.OFFER, True),
    ("sizes", instead(200, {"sizes": None}), UnexpectedAnswer, Scope.OFFER, True),
    ("sizes", instead(200, {"sizes": [{"slug": "x", "gpu_info": {"count": 0}}]}), UnexpectedAnswer, Scope.OFFER, False),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "fault", "error", "scope", "ambiguous"), TOLD)
def test_what_digitalocean_says_means(
    emulator: DigitalOceanEmulator,
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
        "sizes": lambda: cloud.offers(H100),
    }
    emulator.fault(operation, fault)
    with pytest.raises(CloudError) as told:
        calls[operation]()
    assert type(told.value) is error
    assert (told.value.scope, told.value.ambiguous) == (scope, ambiguous)
    assert TOKEN not in f"{told.value} {told.value.answer}"
    assert emulator.calls["create"] <= 2, "a create is never repeated"
    cloud.destroy(box)


def test_a_refusal_for_want_of_capacity_names_the_regions_that_have_some(
    emulator: DigitalOceanEmulator, cloud: Cloud
) -> None:
    offer = offers(cloud)[0]
    emulator.fault("create", unprocessable(NO_SERVERS, available_regions=["ams3", "atl1"]))
    with pytest.raises(CapacityUnavailable, match="can be had in ams3, atl1"):
        cloud.create(offer, spec())


def test_a_create_that_no_connection_was_made_for_leaves_nothing_open(clock: FakeClock) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        cloud = open_cloud("digitalocean", token=TOKEN, base_url=url, clock=clock)
        with pytest.raises(CloudUnreachable) as told:
            cloud.destroy(Box(cloud="digitalocean", id="1", name="", state=BoxState.RUNNING))
    assert not told.value.ambiguous


@pytest.mark.parametrize("operation", ["get_key", "add_key"])
def test_a_key_that_cannot_be_registered_leaves_no_droplet_open(
    emulator: DigitalOceanEmulator, cloud: Cloud, operation: str
) -> None:
    offer = offers(cloud)[0]
    emulator.fault(operation, *[instead(500, "<html>")] * 3)
    with pytest.raises(CloudUnreachable) as told:
        cloud.create(offer, spec())
    assert not told.value.ambiguous
    assert emulator.calls["create"] == 0


def test_a_key_that_somebody_registers_at_the_same_time_is_found(
    emulator: DigitalOceanEmulator, cloud: Cloud
) -> None:
    cloud.destroy(rent(cloud))
    (registered,) = emulator.keys.values()
    other = open_cloud("digitalocean", token=TOKEN, base_url=emulator.url)
    emulator.fault("get_key", instead(404, NOT_FOUND.body))
    box = rent(other)
    assert emulator.book[box.id].data["body"]["ssh_keys"] == [registered["id"]]
    assert len(emulator.keys) == 1
    other.destroy(box)


def test_without_credentials_the_first_call_says_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DIGITALOCEAN_TOKEN", "DIGITALOCEAN_ACCESS_TOKEN", "DO_API_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    cloud = open_cloud("digitalocean@team_a")
    for call in (lambda: cloud.offers(H100), lambda: cloud.find("gf1-"), cloud.identity_secrets):
        with pytest.raises(AuthenticationFailed, match="DIGITALOCEAN_TOKEN__TEAM_A"):
            call()


def test_each_account_has_its_own_token_and_remembers_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DO_API_TOKEN", "ours")
    monkeypatch.setenv("DIGITALOCEAN_TOKEN__TEAM_A", "theirs")
    monkeypatch.setenv("DIGITALOCEAN_TOKEN__TEAM_A_PREVIOUS", "older")
    assert open_cloud("digitalocean").identity_secrets() == (b"ours",)
    assert open_cloud("digitalocean@team_a").identity_secrets() == (b"theirs", b"older")


def test_without_pydo_the_line_to_install_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydo", None)
    with pytest.raises(MissingExtra, match=r"pip install 'gpu-flows\[digitalocean\]'"):
        open_cloud("digitalocean", token=TOKEN).find("gf1-")


# Offers


def test_offers_are_whole_droplets_in_every_region_that_has_them(cloud: Cloud) -> None:
    found = {
        (o.instance_type, o.region): (o.gpu, o.gpu_count, o.vram_gb, o.usd_per_hour)
        for o in cloud.offers(H100)
    }
    assert found[("gpu-h100x8-640gb", "nyc2")] == ("H100-SXM", 8, 80, 23.92)
    assert found[("gpu-h100x8-640gb", "tor1")] == ("H100-SXM", 8, 80, 23.92)
    assert found[("gpu-mi300x1-192gb", "atl1")] == ("MI300X", 1, 192, 1.99)
    slugs = {slug for slug, _ in found}
    assert not [slug for slug in slugs if slug.endswith(("-spot", "-contracted", "-devcloud"))]
    assert "s-1vcpu-1gb" not in slugs


def test_a_size_that_is_listed_nowhere_is_tried_once_in_each_known_region(
    emulator: DigitalOceanEmulator, cloud: Cloud, desk: Desk
) -> None:
    walk = offers(cloud, asking("L40S"))
    assert [(o.region, o.stock, o.stock_level) for o in walk] == [
        (region, None, "listed nowhere") for region in ("ams3", "atl1", "nyc2", "ric1", "tor1")
    ]
    emulator.fault("create", *[unprocessable("Size is not available in this region.")] * 9)
    with pytest.raises(ProvisionError) as told:
        desk.provisioner().provision(desk.lease(), desk.terms(walk, allow_unreaped=True))
    assert told.value.code == "CAPACITY_UNAVAILABLE"
    assert emulator.calls["create"] == len(walk)


def test_what_is_not_sold_now_or_too_small_is_kept_with_the_reason(
    emulator: DigitalOceanEmulator, cloud: Cloud
) -> None:
    emulator.sizes[2]["available"] = False
    why = {o.instance_type: o.unavailable for o in cloud.offers(replace(H100, disk_gb=1000))}
    assert why["gpu-h100x8-640gb"] == "DigitalOcean does not sell it now"
    assert why["gpu-h100x1-80gb"] == "1000 GB of disk are asked for, and it has 720"
    assert why["gpu-mi300x8-1536gb"] is None


@pytest.mark.parametrize("request_", ["H100:4", "H100:2", ["H100:4", "MI300X:2"], "H100!:3"])
def test_another_number_of_cards_is_refused_before_anything_is_sent(
    emulator: DigitalOceanEmulator, cloud: Cloud, request_: str | list[str]
) -> None:
    with pytest.raises(NotOffered, match=r"rents 1 or 8 cards .*gpu-h100x1-80gb, gpu-h100x8-640gb") as told:
        cloud.offers(asking(request_))
    assert told.value.scope is Scope.CLOUD
    assert emulator.requests == []


def test_only_the_alternatives_with_another_number_are_refused(cloud: Cloud) -> None:
    query = asking(["H100:4", "MI300X:8"])
    assert {o.instance_type for o in offers(cloud, query)} == {"gpu-mi300x8-1536gb"}
    why = {o.instance_type: o.unavailable for o in cloud.offers(query)}
    assert why["gpu-h100x8-640gb"] == "droplets have 1 or 8 cards, not 4"


def test_all_pages_are_read(emulator: DigitalOceanEmulator, cloud: Cloud) -> None:
    emulator.per_page = 2
    assert len({o.instance_type for o in cloud.offers(H100)}) == 5
    boxes = [rent(cloud) for _ in range(5)]
    assert len(cloud.find("gf1-")) == 5
    for box in boxes:
        cloud.destroy(box)


def test_an_unknown_card_is_offered_by_the_name_that_digitalocean_gives_it(
    emulator: DigitalOceanEmulator, cloud: Cloud
) -> None:
    emulator.sizes[1]["gpu_info"]["model"] = "nvidia_x900"
    (found,) = offers(cloud, asking("raw:nvidia_x900"))
    assert (found.gpu, found.instance_type, found.vram_gb) == ("nvidia_x900", "gpu-h100x1-80gb", 80)


# Create


@pytest.mark.parametrize(
    ("request_", "image", "sent"),
    [
        ("H100:8", None, "gpu-h100x8-base"),
        ("H100:1", None, "gpu-h100x1-base"),
        ("MI300X:1", None, "gpu-amd-base"),
        ("MI300X:8", None, "gpu-amd-base"),
        ("H100:1", "gpu-torch-base", "gpu-torch-base"),
        ("H100:1", "123456789", 123456789),
    ],
)
def test_the_image_fits_the_cards(
    emulator: DigitalOceanEmulator, cloud: Cloud, request_: str, image: str | None, sent: str | int
) -> None:
    box = rent(cloud, asking(request_), image=image)
    body = emulator.book[box.id].data["body"]
    assert body["image"] == sent
    assert "user_data" not in body, "no token may lie on the box"
    cloud.destroy(box)


def test_user_data_that_is_too_long_is_refused_here(emulator: DigitalOceanEmulator) -> None:
    cloud = open_cloud("digitalocean", token=TOKEN, token_on_box="other", base_url=emulator.url)
    with pytest.raises(RequestRefused, match="64 KiB"):
        rent(cloud, boot_script="#" * 65536)
    assert emulator.calls["create"] == 0


# What a lease makes of it


def test_a_box_that_cannot_end_its_own_billing_has_to_be_allowed(cloud: Cloud, desk: Desk) -> None:
    assert not cloud.capabilities.self_destruct
    with pytest.raises(ProvisionError, match="allow_unreaped=True"):
        desk.provisioner().provision(desk.lease(), desk.terms(offers(cloud)))
    lease, _ = desk.provisioner().provision(desk.lease(), desk.terms(offers(cloud), allow_unreaped=True))
    cloud.destroy(lease.boxes[0].box)


def test_c09_a_droplet_that_is_off_is_found_shown_to_bill_and_destroyed(
    emulator: DigitalOceanEmulator, cloud: Cloud, desk: Desk
) -> None:
    lease, _ = desk.provisioner().provision(desk.lease(), desk.terms(offers(cloud), allow_unreaped=True))
    (row,) = emulator.live()
    row.state = "off"
    (found,) = cloud.find(lease.prefix)
    assert (found.state, found.usd_per_hour) == (BoxState.STOPPED, 23.92)
    assert "billed all the same" in found.state_reason
    teardown(OWNER, NAMESPACE, [cloud], journal=desk.journal(), clock=desk.clock)
    assert row.deletes == 1


@pytest.mark.parametrize("fault", [after(500, {"id": "server_error"}), after(202, ""), hang_up_after])
def test_c11_a_create_that_fails_after_the_droplet_exists_is_adopted(
    emulator: DigitalOceanEmulator, cloud: Cloud, desk: Desk, fault: Fault
) -> None:
    walk = offers(cloud)
    emulator.list_lag_polls = 3
    emulator.fault("create", fault)
    lease, attempts = desk.provisioner().provision(desk.lease(), desk.terms(walk, allow_unreaped=True))
    assert [row.id for row in emulator.live()] == [lease.boxes[0].box.id]
    assert emulator.calls["create"] == 1
    assert [attempt.code for attempt in attempts] == ["OK"]
    cloud.destroy(lease.boxes[0].box)


def test_c19_a_droplet_that_costs_more_than_it_was_offered_for_is_destroyed(
    emulator: DigitalOceanEmulator, cloud: Cloud, desk: Desk
) -> None:
    walk = offers(cloud)[:1]
    emulator.sizes[2]["price_hourly"] = 40.0
    with pytest.raises(ProvisionError) as told:
        desk.provisioner().provision(desk.lease(), desk.terms(walk, price_cap=24, allow_unreaped=True))
    assert told.value.code == "PRICE_TOO_HIGH"
    assert [row.deletes for row in emulator.book.values()] == [1]


def test_a_status_that_nobody_knows_is_not_taken_for_an_end(
    emulator: DigitalOceanEmulator, cloud: Cloud
) -> None:
    box = rent(cloud)
    answer = emulator._droplet(emulator.book[box.id]) | {"status": "migrating"}
    emulator.fault("get", instead(200, {"droplet": answer}))
    now = cloud.describe(box)
    assert (now.state, now.state_reason) == (BoxState.STARTING, "migrating")
    cloud.destroy(box)
