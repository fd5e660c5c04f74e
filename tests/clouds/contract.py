"""The suite that every cloud has to pass.

A cloud's tests subclass `CloudContract` and say how to open the cloud against an emulator (or, for `local`,
the real thing)::

    class TestMyCloud(CloudContract):
        @pytest.fixture
        def cloud(self, emulator): return MyCloud(api_key="invented", transport=emulator.transport)

        def reopen(self, cloud): ...

What must be given raises NotImplementedError here; what a cloud may lack (a state, SSH in its emulator) is
declared by returning None or False, and the test is skipped with that reason. Nothing here waits for
seconds to pass: `until` polls, and an emulator moves its own clock.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count

import pytest

from gpu_flows.clouds.base import Box, BoxSpec, BoxState, Capabilities, Cloud
from gpu_flows.clouds.errors import CloudError, UnexpectedAnswer
from gpu_flows.gpus.request import GpuRequest
from gpu_flows.offers import Offer, OfferQuery

BILLS = [state for state in BoxState if state is not BoxState.GONE]
_numbers = count(1)


def box_name(*, lease: str = "leaseaaaaaaa", node: int = 0, namespace: str = "test") -> str:
    """Return a name as leases give it: gf1-namespace-lease-node-created-nonce-deadline."""
    assert len(lease) == 12
    return f"gf1-{namespace}-{lease}-{node:02d}-t4lw5c0-{next(_numbers):08d}-t4m7nc0"


def until(true: Callable[[], bool], what: str, timeout_s: float = 30) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


class CloudContract:
    """What holds for every cloud."""

    # What a cloud's tests give.

    request_text: str = "H100:8"
    """A request that the emulator has an offer for."""
    unknown_id: str = "no-such-box"
    """A well-formed id that was never given out."""
    public_key: str = (
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBmSMRcWgUpPcmNIRBVtmJJjsbNwPLzLQSrDmrNSYXGY contract"
    )
    """The key that boxes are made with."""
    secrets: tuple[str, ...] = ()
    """The credentials that the fixture opened the cloud with."""

    @pytest.fixture
    def cloud(self) -> Cloud:
        """Open the cloud; its account holds no box yet."""
        raise NotImplementedError

    def reopen(self, cloud: Cloud) -> Cloud:
        """Open the same account once more, as another process would."""
        raise NotImplementedError

    def broken_listing(self, cloud: Cloud) -> AbstractContextManager[object]:
        """Make the cloud answer with something that is no listing, for as long as the context lasts."""
        raise NotImplementedError

    def foreign_box(self, cloud: Cloud, name: str) -> str | None:
        """Make a box of somebody else in the same account and return its id; None where names are never so."""
        raise NotImplementedError

    def foreign_box_lives(self, cloud: Cloud, box_id: str) -> bool:
        """Tell from the cloud's own book whether that box is untouched."""
        raise NotImplementedError

    def drive(self, cloud: Cloud, box: Box, state: BoxState) -> bool:
        """Bring a box into a state; False when this cloud knows no such state."""
        raise NotImplementedError

    def unrentable(self, offer: Offer, spec: BoxSpec) -> tuple[Offer, BoxSpec]:
        """Return a create that the cloud refuses."""
        return replace(offer, instance_type="no-such-type"), spec

    def in_box(self, cloud: Cloud, box: Box, command: str) -> str | None:
        """Run sh in a running box and return its output; None where the emulator has no SSH."""
        return None

    def box_side(self, cloud: Cloud, box: Box, command: str) -> bool:
        """Start sh in a box without waiting for it, as its dead-man would; False where nothing can run."""
        return False

    # What every test uses.

    @pytest.fixture
    def query(self) -> OfferQuery:
        return OfferQuery(request=GpuRequest.parse(self.request_text))

    @pytest.fixture
    def offer(self, cloud: Cloud, query: OfferQuery) -> Offer:
        return next(offer for offer in cloud.offers(query) if offer.unavailable is None)

    @pytest.fixture
    def rent(self, cloud: Cloud, offer: Offer) -> Iterator[Callable[..., Box]]:
        """Rent boxes; whatever happens, they are given back and proven gone."""
        rented: list[Box] = []
        lock = threading.Lock()

        def rent(name: str | None = None, **changes: object) -> Box:
            box = cloud.create(offer, self.spec(name, **changes))
            with lock:
                rented.append(box)
            return box

        yield rent
        for box in rented:
            cloud.destroy(box)
        for box in rented:
            self.until_gone(cloud, box)

    def spec(self, name: str | None = None, **changes: object) -> BoxSpec:
        name = name or box_name()
        return replace(
            BoxSpec(
                name=name,
                nonce=name.split("-")[5] if name.startswith("gf1-") else "00000000",
                owner='["cli","contract"]',
                ssh_public_key=self.public_key,
                deadline=datetime.now(UTC) + timedelta(hours=1),
            ),
            **changes,  # type: ignore[arg-type]
        )

    def until_gone(self, cloud: Cloud, box: Box) -> None:
        until(lambda: cloud.describe(box).state is BoxState.GONE, f"{box.id} is gone")

    def until_running(self, cloud: Cloud, box: Box) -> Box:
        until(lambda: cloud.describe(box).state is not BoxState.STARTING, f"{box.id} has started")
        now = cloud.describe(box)
        assert now.state is BoxState.RUNNING, now.state_reason
        return now

    def ids(self, cloud: Cloud, prefix: str = "gf1-") -> list[str]:
        return sorted(box.id for box in cloud.find(prefix))

    # What the cloud says of itself.

    def test_it_is_a_cloud(self, cloud: Cloud) -> None:
        assert isinstance(cloud, Cloud)
        assert isinstance(cloud.capabilities, Capabilities)
        assert cloud.name == cloud.name.lower()
        assert cloud.account
        assert cloud.capabilities.lag_s >= 0
        assert cloud.capabilities.ready_timeout_s > 0

    def test_offers_say_whose_they_are_and_what_they_cost(self, cloud: Cloud, query: OfferQuery) -> None:
        offers = cloud.offers(query)
        assert any(offer.unavailable is None for offer in offers)
        for offer in offers:
            assert (offer.cloud, offer.account) == (cloud.name, cloud.account)
            assert offer.usd_per_hour >= 0
            assert offer.instance_type
            assert offer.unavailable != "", "an unavailable offer says why"
            assert 0 <= offer.alternative < len(query.request.alternatives)
            assert Offer.from_json(json.loads(json.dumps(offer.to_json()))) == offer

    def test_what_it_cannot_rent_is_not_offered(self, cloud: Cloud) -> None:
        text = "H100:8" if cloud.capabilities.cpu else "cpu"
        offers = cloud.offers(OfferQuery(request=GpuRequest.parse(text)))
        wrong = [o for o in offers if o.unavailable is None and (o.gpu is None) is (text != "cpu")]
        assert wrong == []

    def test_the_identity_is_the_same_in_another_process(self, cloud: Cloud) -> None:
        secrets = cloud.identity_secrets()
        assert all(secrets)
        assert self.reopen(cloud).identity_secrets() == secrets

    # Create.

    def test_one_create_makes_one_box_that_carries_its_name(
        self, cloud: Cloud, offer: Offer, rent: Callable[..., Box]
    ) -> None:
        name = box_name()
        assert self.ids(cloud) == []
        box = rent(name)
        found = cloud.find(name)
        assert [(b.id, b.name) for b in found] == [(box.id, name)]
        assert self.ids(cloud) == [box.id]
        for b in (box, found[0], cloud.describe(box)):
            assert (b.cloud, b.account) == (cloud.name, cloud.account)
            assert b.state is not BoxState.GONE
            assert b.usd_per_hour is None or b.usd_per_hour == pytest.approx(offer.usd_per_hour)
            assert b.created_at is None or b.created_at.tzinfo is not None
            assert b.gpu_count == offer.gpu_count

    def test_the_name_is_known_from_the_first_moment(self, cloud: Cloud, rent: Callable[..., Box]) -> None:
        if not cloud.capabilities.names_at_create:
            pytest.skip("this cloud takes no name in the create call, and declares it")
        assert rent(name := box_name()).name == name

    def test_another_process_finds_the_box_by_its_name_alone(
        self, cloud: Cloud, rent: Callable[..., Box]
    ) -> None:
        box = rent(name := box_name())
        other = self.reopen(cloud)
        assert [b.id for b in other.find(name)] == [box.id]
        other.destroy(other.find(name)[0])
        self.until_gone(cloud, box)

    def test_a_refused_create_makes_nothing(self, cloud: Cloud, offer: Offer) -> None:
        refused_offer, refused_spec = self.unrentable(offer, self.spec())
        with pytest.raises(CloudError) as refusal:
            cloud.create(refused_offer, refused_spec)
        assert not refusal.value.ambiguous
        assert str(refusal.value)
        assert self.ids(cloud) == []

    def test_the_same_nonce_makes_the_same_box(
        self, cloud: Cloud, offer: Offer, rent: Callable[..., Box]
    ) -> None:
        if not cloud.capabilities.idempotent_create:
            pytest.skip("this cloud has no idempotent create, and declares it")
        spec = self.spec()
        box = rent(spec.name, nonce=spec.nonce, deadline=spec.deadline)
        assert cloud.create(offer, spec).id == box.id
        assert self.ids(cloud) == [box.id]

    def test_four_creates_at_once_make_four_boxes(self, cloud: Cloud, rent: Callable[..., Box]) -> None:
        names = [box_name(node=node) for node in range(4)]
        with ThreadPoolExecutor(4) as pool:
            boxes = list(pool.map(rent, names))
        assert len({box.id for box in boxes}) == 4
        assert {box.name for box in cloud.find("gf1-test-")} == set(names)

    # Find and describe.

    @pytest.mark.parametrize("state", BILLS)
    def test_a_box_is_found_and_destroyed_in_every_state_that_bills(
        self, cloud: Cloud, rent: Callable[..., Box], state: BoxState
    ) -> None:
        box = rent(name := box_name())
        if not self.drive(cloud, box, state):
            pytest.skip(f"a box of this cloud is never {state}")
        assert [(b.id, b.state) for b in cloud.find(name)] == [(box.id, state)]
        assert cloud.describe(box).state is state
        cloud.destroy(box)
        self.until_gone(cloud, box)
        assert self.ids(cloud) == []

    def test_a_prefix_finds_nothing_that_only_looks_like_it(
        self, cloud: Cloud, rent: Callable[..., Box]
    ) -> None:
        one, ten = box_name(node=1), box_name(node=10)
        names = [one, ten, box_name(lease="leaseaaaaaab"), box_name(namespace="test2")]
        boxes = {name: rent(name) for name in names}
        assert self.ids(cloud, "gf1-test-leaseaaaaaaa-01-") == [boxes[one].id]
        assert self.ids(cloud, "gf1-test-leaseaaaaaaa-") == sorted([boxes[one].id, boxes[ten].id])
        assert self.ids(cloud, "gf1-test2-") == [boxes[names[3]].id]
        assert self.ids(cloud, "test-leaseaaaaaaa") == [], "a prefix begins at the beginning"
        assert self.ids(cloud, "gf1-.*-") == [], "a prefix is no pattern"
        assert self.ids(cloud, "gf1-nobody-") == []

    def test_c05_an_answer_that_is_no_listing_is_never_taken_for_an_empty_one(
        self, cloud: Cloud, rent: Callable[..., Box]
    ) -> None:
        rent()
        with self.broken_listing(cloud), pytest.raises(UnexpectedAnswer):
            cloud.find("gf1-test-")

    def test_a_box_is_plain_json_without_a_secret(self, cloud: Cloud, rent: Callable[..., Box]) -> None:
        box = rent()
        texts = [
            repr(cloud),
            str(vars(cloud.capabilities)) if hasattr(cloud.capabilities, "__dict__") else "",
        ]
        for now in (box, self.until_running(cloud, box), *cloud.find("gf1-")):
            text = json.dumps(now.to_json())
            assert Box.from_json(json.loads(text)) == now
            texts += [text, repr(now)]
        secrets = [secret.decode("latin-1") for secret in cloud.identity_secrets()] + list(self.secrets)
        assert not [secret for secret in secrets for text in texts if secret in text]

    def test_boxes_of_one_lease_have_addresses_for_each_other(
        self, cloud: Cloud, rent: Callable[..., Box]
    ) -> None:
        if not cloud.capabilities.multi_node:
            pytest.skip("this cloud connects no boxes, and declares it")
        boxes = [self.until_running(cloud, rent(box_name(node=node))) for node in range(2)]
        addresses = {box.private_address for box in boxes}
        assert None not in addresses
        assert len(addresses) == 2

    def test_a_running_box_answers_ssh(self, cloud: Cloud, rent: Callable[..., Box]) -> None:
        box = self.until_running(cloud, rent())
        assert box.endpoint is not None
        output = self.in_box(cloud, box, "echo here; echo $((6 * 7))")
        if output is None:
            pytest.skip("the emulator of this cloud has no SSH")
        assert output == "here\n42\n"

    # Destroy.

    def test_a_destroyed_box_is_gone(self, cloud: Cloud, rent: Callable[..., Box]) -> None:
        box = self.until_running(cloud, rent())
        cloud.destroy(box)
        self.until_gone(cloud, box)
        gone = cloud.describe(box)
        assert (gone.id, gone.state) == (box.id, BoxState.GONE)
        assert gone.ended_at is None or box.created_at is None or gone.ended_at >= box.created_at
        assert self.ids(cloud) == []
        assert Box.from_json(json.loads(json.dumps(gone.to_json()))) == gone

    def test_destroying_again_is_fine(self, cloud: Cloud, rent: Callable[..., Box]) -> None:
        box = rent()
        cloud.destroy(box)
        cloud.destroy(box)
        self.until_gone(cloud, box)
        ended_at = cloud.describe(box).ended_at
        cloud.destroy(box)
        assert cloud.describe(box).state is BoxState.GONE
        assert cloud.describe(box).ended_at == ended_at

    def test_four_destroys_at_once_are_fine(self, cloud: Cloud, rent: Callable[..., Box]) -> None:
        box = self.until_running(cloud, rent())
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(cloud.destroy, [box] * 4))
        self.until_gone(cloud, box)

    def test_a_box_that_never_was_is_gone(self, cloud: Cloud) -> None:
        never = Box(
            cloud=cloud.name, account=cloud.account, id=self.unknown_id, name="", state=BoxState.RUNNING
        )
        assert cloud.describe(never).state is BoxState.GONE
        cloud.destroy(never)
        assert cloud.describe(never).state is BoxState.GONE

    def test_c03_an_empty_id_is_never_sent(self, cloud: Cloud, rent: Callable[..., Box]) -> None:
        box = rent()
        with pytest.raises(ValueError, match="empty id"):
            replace(box, id="")
        forged = replace(box)
        object.__setattr__(forged, "id", "")
        with pytest.raises((CloudError, ValueError)):
            cloud.destroy(forged)
        assert self.ids(cloud) == [box.id]

    def test_c07_the_boxes_of_others_are_not_touched(self, cloud: Cloud, rent: Callable[..., Box]) -> None:
        box = rent()
        names = ["somebody-elses-machine", f"x-{box.name}"[:63], ""]
        foreign = [self.foreign_box(cloud, name) for name in names]
        assert self.ids(cloud) == [box.id]
        cloud.destroy(box)
        self.until_gone(cloud, box)
        assert all(self.foreign_box_lives(cloud, box_id) for box_id in foreign if box_id is not None)

    # The box ends itself.

    def test_self_destruct_is_as_declared(self, cloud: Cloud) -> None:
        text = cloud.self_destruct(self.spec())
        assert (text is not None) == cloud.capabilities.self_destruct
        assert not [secret for secret in self.secrets if secret in (text or "")]

    def test_a_box_ends_its_own_billing(self, cloud: Cloud, rent: Callable[..., Box]) -> None:
        box = self.until_running(cloud, rent())
        text = cloud.self_destruct(self.spec(box.name))
        if text is None or not self.box_side(cloud, box, text):
            pytest.skip("this cloud cannot, or its emulator runs nothing")
        self.until_gone(cloud, box)
        assert self.ids(cloud) == []

    def test_the_boot_script_runs_though_nobody_ever_connects(
        self, cloud: Cloud, rent: Callable[..., Box]
    ) -> None:
        text = cloud.self_destruct(self.spec())
        if text is None or self.in_box(cloud, self.until_running(cloud, rent()), "true") is None:
            pytest.skip("this cloud cannot, or its emulator runs nothing")
        box = rent(boot_script=f"{text}\n")
        self.until_gone(cloud, box)
