"""Failing over, settling, adopting: every answer that a cloud was seen to give to a create call."""

from __future__ import annotations

from datetime import timedelta

import pytest

from gpu_flows.clouds.base import BoxState, Capabilities
from gpu_flows.clouds.errors import BoxCheckFailed, BoxNotReady, Scope, SuspectedLeak
from gpu_flows.leases.lease import BoxName, LeaseConflict, Owner, new_nonce
from gpu_flows.leases.provision import OwnerEnded, ProvisionError
from tests.leases.conftest import NAMESPACE, Desk


def name_for(desk: Desk, node: int = 0, *, age_s: float = 0) -> str:
    created = desk.clock.now() - timedelta(seconds=age_s)
    return str(
        BoxName(
            namespace=NAMESPACE,
            lease=desk.lease().id,
            node=node,
            created=created,
            nonce=new_nonce(),
            deadline=created + timedelta(hours=5),
        )
    )


def test_the_first_offer_that_works_is_taken(desk: Desk) -> None:
    cloud = desk.cloud()
    lease, attempts = desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()]))
    (leased,) = lease.boxes
    assert [record.box.id for record in cloud.live()] == [leased.box.id]
    assert leased.box.endpoint is not None
    assert leased.box.endpoint.host_key == "ssh-ed25519 AAAA"
    assert leased.name.lease == lease.id
    assert leased.ready_at is not None
    assert [a.code for a in attempts] == ["OK"]


def test_the_dead_man_rides_in_the_create_call(desk: Desk) -> None:
    cloud = desk.cloud()
    lease, _ = desk.provisioner().provision(
        desk.lease(), desk.terms([cloud.offer()], max_duration=timedelta(hours=2))
    )
    (record,) = cloud.live()
    assert record.spec is not None
    assert record.spec.boot_script.endswith("halt")
    # 600 s to become ready, two hours of work, fifteen minutes of slack.
    assert record.spec.deadline - desk.clock.now() <= timedelta(hours=2, minutes=25)
    assert lease.deadline == record.spec.deadline


def test_an_intent_is_written_before_the_create_is_sent(desk: Desk) -> None:
    cloud = desk.cloud()
    seen: list[str] = []
    cloud.after_create = lambda box: seen.extend(e["event"] for e in desk.journal().entries())
    desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()]))
    assert seen == ["intent"]
    assert [e["event"] for e in desk.journal().entries()] == ["intent", "created"]


@pytest.mark.parametrize("fault", ["unreachable_after", "nonsense_after", "crash_after", "twice"])
@pytest.mark.parametrize("lag_polls", [0, 3])
def test_c11_a_create_that_fails_after_the_box_exists_is_adopted(
    desk: Desk, fault: str, lag_polls: int
) -> None:
    cloud = desk.cloud()
    cloud.faults.create.append(fault)
    cloud.faults.list_lag_polls = lag_polls
    lease, attempts = desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()]))
    assert len(lease.boxes) == 1
    assert cloud.calls["create"] == 1
    assert [record.box.id for record in cloud.live()] == [lease.boxes[0].box.id]
    assert [a.code for a in attempts] == ["OK"]


def test_c11_a_create_that_failed_before_the_box_existed_goes_to_the_next_offer(desk: Desk) -> None:
    cloud = desk.cloud()
    cloud.faults.create.append("unreachable_before")
    offers = [cloud.offer(), cloud.offer(region="r2")]
    lease, attempts = desk.provisioner().provision(desk.lease(), desk.terms(offers))
    assert [a.code for a in attempts] == ["CLOUD_UNREACHABLE", "OK"]
    assert lease.boxes[0].box.region == "r2"
    # It was looked for until the listing could no longer lag behind.
    assert sum(desk.clock.slept) >= cloud.capabilities.lag_s


def test_c11_a_clear_refusal_is_not_looked_up(desk: Desk) -> None:
    cloud = desk.cloud()
    cloud.faults.create.append("no_capacity")
    with pytest.raises(ProvisionError) as caught:
        desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()]))
    assert caught.value.code == "CAPACITY_UNAVAILABLE"
    assert cloud.calls["find"] == 2  # the look for what an earlier attempt left: found, survivors
    assert not desk.clock.slept


def test_an_id_in_an_error_is_destroyed_first(desk: Desk) -> None:
    cloud = desk.cloud()
    cloud.faults.create.append("id_in_error")
    with pytest.raises(ProvisionError):
        desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()]))
    assert cloud.live() == []
    assert cloud.calls["destroy"] == 1


def test_c05_a_cloud_that_cannot_be_listed_is_never_rented_from(desk: Desk) -> None:
    cloud, other = desk.cloud("vast"), desk.cloud("other")
    cloud.faults.find.extend(["unexpected"] * 5)
    lease, attempts = desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer(), other.offer()]))
    assert lease.boxes[0].box.cloud == "other"
    assert cloud.calls["create"] == 0
    assert attempts[0].code == "UNEXPECTED_ANSWER"
    assert "deprecated_endpoint" in attempts[0].reason


def test_a_create_that_nobody_can_look_up_is_a_suspected_leak(desk: Desk) -> None:
    cloud, other = desk.cloud("one"), desk.cloud("two")
    cloud.faults.create.append("unreachable_after")
    cloud.faults.find.extend(["ok", "ok", *["unreachable"] * 50])
    with pytest.raises((SuspectedLeak, ProvisionError)) as caught:
        desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer(), other.offer()]))
    assert "SUSPECTED_LEAK" in caught.value.code or "SUSPECTED_LEAK" in str(caught.value)
    assert other.calls["create"] == 0, "nothing more is rented while a box may exist unseen"
    assert desk.journal().unsettled(), "a teardown has to look for it"


def test_an_idempotent_create_is_repeated_with_the_same_nonce(desk: Desk) -> None:
    cloud = desk.cloud(capabilities=Capabilities(idempotent_create=True, lag_s=60))
    cloud.faults.create.append("unreachable_before")
    lease, _ = desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()]))
    assert cloud.calls["create"] == 2
    assert len({e["name"] for e in desk.journal().entries()}) == 1
    assert len(lease.boxes) == 1


def test_c13_accepted_then_failed_for_capacity_goes_on(desk: Desk) -> None:
    cloud = desk.cloud()
    cloud.faults.create.extend(["late_capacity", "no_address"])
    offers = [cloud.offer(region=region) for region in ("r1", "r2", "r3")]
    lease, attempts = desk.provisioner().provision(desk.lease(), desk.terms(offers))
    assert [a.code for a in attempts] == ["BOX_LOST", "BOX_NOT_READY", "OK"]
    assert "insufficient capacity" in attempts[0].reason
    assert "no address" in attempts[1].reason
    assert [record.box.id for record in cloud.live()] == [lease.boxes[0].box.id]
    assert desk.checked == [lease.boxes[0].box.id], "never connects to a box without an address"


def test_c17_a_wrong_key_blocks_its_cloud_and_no_other(desk: Desk) -> None:
    bad, good = desk.cloud("bad"), desk.cloud("good")
    bad.faults.create.extend(["denied"])
    offers = [bad.offer(region="r1"), bad.offer(region="r2"), bad.offer(region="r3"), good.offer()]
    lease, attempts = desk.provisioner().provision(desk.lease(), desk.terms(offers))
    assert bad.calls["create"] == 1
    assert [a.code for a in attempts] == ["AUTHENTICATION_FAILED"] * 3 + ["OK"]
    assert lease.boxes[0].box.cloud == "good"


def test_c19_a_box_that_is_dearer_than_the_cap_is_destroyed(desk: Desk) -> None:
    cloud = desk.cloud()
    cloud.faults.create.append("dearer")
    offers = [cloud.offer(), cloud.offer(region="r2")]
    lease, attempts = desk.provisioner().provision(desk.lease(), desk.terms(offers, price_cap=25))
    assert [a.code for a in attempts] == ["PRICE_TOO_HIGH", "OK"]
    assert len(cloud.live()) == 1
    assert lease.usd_per_hour == 20.0


def test_a_box_that_fails_its_check_is_replaced(desk: Desk) -> None:
    cloud = desk.cloud()
    desk.check_errors = [BoxNotReady("sshd is starting"), BoxCheckFailed("7 GPUs where 8 were promised")]
    offers = [cloud.offer(), cloud.offer(region="r2")]
    lease, attempts = desk.provisioner().provision(desk.lease(), desk.terms(offers))
    assert [a.code for a in attempts] == ["BOX_CHECK_FAILED", "OK"]
    assert [record.box.id for record in cloud.live()] == [lease.boxes[0].box.id]


def test_fewer_gpus_than_offered_is_not_what_was_promised(desk: Desk) -> None:
    cloud = desk.cloud()
    cloud.faults.create.append("fewer_gpus")
    lease, attempts = desk.provisioner().provision(
        desk.lease(), desk.terms([cloud.offer(), cloud.offer(region="r2")])
    )
    assert [a.code for a in attempts] == ["UNEXPECTED_ANSWER", "OK"]
    assert len(cloud.live()) == 1
    assert lease.boxes[0].box.gpu_count == 8


def test_a_retry_finds_its_box_and_rents_no_second_one(desk: Desk) -> None:
    cloud = desk.cloud()
    first, _ = desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()]))
    second, attempts = desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()]))
    assert cloud.calls["create"] == 1
    assert first.boxes[0].box.id == second.boxes[0].box.id
    assert attempts == []


def test_c09_a_stopped_box_of_an_earlier_attempt_is_destroyed_and_replaced(desk: Desk) -> None:
    cloud = desk.cloud()
    old = cloud.add(name_for(desk, age_s=600), state=BoxState.STOPPED)
    lease, _ = desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()]))
    assert cloud.book[old.id].ended_at is not None
    assert [record.box.id for record in cloud.live()] == [lease.boxes[0].box.id]


def test_c15_a_box_that_was_there_before_is_never_destroyed_by_failing_over(desk: Desk) -> None:
    cloud = desk.cloud()
    old = cloud.add(name_for(desk, age_s=600), usd_per_hour=99)
    with pytest.raises(LeaseConflict, match="above the cap"):
        desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()], price_cap=25))
    assert cloud.book[old.id].ended_at is None
    assert cloud.calls["create"] == 0


def test_of_two_at_once_the_oldest_stays(desk: Desk) -> None:
    cloud = desk.cloud()
    other: list[str] = []

    def another_attempt(_: object) -> None:
        cloud.after_create = None
        other.append(cloud.add(name_for(desk, age_s=30)).id)

    cloud.after_create = another_attempt
    lease, _ = desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()]))
    assert [record.box.id for record in cloud.live()] == other
    assert lease.boxes[0].box.id == other[0]


def test_of_two_at_once_the_one_with_a_job_stays(desk: Desk) -> None:
    cloud, elsewhere = desk.cloud("one"), desk.cloud("two")
    older = cloud.add(name_for(desk, age_s=100))
    working = elsewhere.add(name_for(desk, age_s=50))
    desk.started_jobs.add(working.id)
    lease, _ = desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()]))
    assert lease.boxes[0].box.id == working.id
    assert cloud.book[older.id].ended_at is not None


def test_a_gang_is_all_or_nothing(desk: Desk) -> None:
    cloud = desk.cloud()
    cloud.faults.create.extend(["ok", "no_capacity", "ok"])
    offers = [cloud.offer(), cloud.offer(region="r2")]
    lease, attempts = desk.provisioner().provision(desk.lease(nodes=3), desk.terms(offers, nodes=3))
    assert [a.code for a in attempts] == ["CAPACITY_UNAVAILABLE", "OK"]
    assert sorted(leased.node for leased in lease.boxes) == [0, 1, 2]
    assert {record.box.region for record in cloud.live()} == {"r2"}
    assert len(cloud.live()) == 3


def test_the_rest_of_a_broken_gang_is_replaced(desk: Desk) -> None:
    cloud = desk.cloud()
    left = cloud.add(name_for(desk, node=1, age_s=60))
    lease, _ = desk.provisioner().provision(desk.lease(nodes=2), desk.terms([cloud.offer()], nodes=2))
    assert cloud.book[left.id].ended_at is not None
    assert len(cloud.live()) == len(lease.boxes) == 2


def test_a_cloud_that_cannot_connect_boxes_is_not_asked_for_a_gang(desk: Desk) -> None:
    cloud = desk.cloud(capabilities=Capabilities(multi_node=False))
    with pytest.raises(ProvisionError, match="cannot connect 2 boxes"):
        desk.provisioner().provision(desk.lease(nodes=2), desk.terms([cloud.offer()], nodes=2))
    assert cloud.calls["create"] == 0


def test_a_box_that_cannot_end_itself_needs_a_reaper(desk: Desk) -> None:
    cloud = desk.cloud(capabilities=Capabilities(self_destruct=False))
    with pytest.raises(ProvisionError, match="allow_unreaped"):
        desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()]))
    lease, _ = desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()], allow_unreaped=True))
    assert len(lease.boxes) == 1


def test_an_owner_that_has_ended_rents_nothing(desk: Desk) -> None:
    cloud = desk.cloud()
    desk.wanted = False
    with pytest.raises(OwnerEnded):
        desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()]))
    assert cloud.calls["create"] == 0


def test_an_owner_that_ends_during_the_create_keeps_nothing(desk: Desk) -> None:
    cloud = desk.cloud()
    cloud.after_create = lambda _: setattr(desk, "wanted", False)
    with pytest.raises(OwnerEnded):
        desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()]))
    assert cloud.live() == []


def test_c65_a_clock_that_is_wrong_by_hours_rents_nothing(desk: Desk) -> None:
    cloud = desk.cloud(skew_s=5.5 * 3600)
    with pytest.raises(ProvisionError, match="clock"):
        desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()]))
    assert cloud.calls["create"] == 0


def test_a_small_skew_is_counted_in(desk: Desk) -> None:
    cloud = desk.cloud(skew_s=120)
    lease, _ = desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()]))
    assert lease.boxes[0].name.created == desk.clock.now() + timedelta(seconds=120)


def test_waiting_for_capacity_asks_again_until_its_deadline(desk: Desk) -> None:
    cloud = desk.cloud()
    rounds: list[int] = []

    def offers() -> list[object]:
        rounds.append(1)
        return [cloud.offer(unavailable=None if len(rounds) > 3 else "sold out")]

    lease, _ = desk.provisioner().provision(
        desk.lease(), desk.terms(offers, wait_for_capacity=timedelta(minutes=10))
    )
    assert len(lease.boxes) == 1
    assert len(rounds) == 4
    with pytest.raises(ProvisionError):
        desk.provisioner().provision(
            desk.lease(owner=desk.lease().owner.__class__(("cli", "other"))),
            desk.terms([cloud.offer(unavailable="sold out")], wait_for_capacity=timedelta(minutes=10)),
        )


def test_waiting_does_not_help_against_a_wrong_key(desk: Desk) -> None:
    cloud = desk.cloud()
    cloud.faults.create.append("denied")
    with pytest.raises(ProvisionError) as caught:
        desk.provisioner().provision(
            desk.lease(), desk.terms([cloud.offer()], wait_for_capacity=timedelta(hours=1))
        )
    assert caught.value.code == "AUTHENTICATION_FAILED"
    assert not desk.clock.slept


def test_a_full_disk_does_not_lose_the_box(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_flows.leases.journal import Journal, JournalUnwritable

    def full(*_: object, **__: object) -> None:
        raise JournalUnwritable("no space left on device")

    monkeypatch.setattr(Journal, "record", full)
    cloud = desk.cloud()
    lease, _ = desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()]))
    assert len(cloud.live()) == len(lease.boxes) == 1
    unnamed = desk.cloud("unnamed", capabilities=Capabilities(names_at_create=False))
    desk.clouds[:] = [unnamed]
    from gpu_flows.leases.lease import Owner

    with pytest.raises(ProvisionError, match="without a journal"):
        owner = Owner(("cli", "second"))
        desk.provisioner(owner).provision(desk.lease(owner=owner), desk.terms([unnamed.offer()]))
    assert unnamed.calls["create"] == 0


def test_the_error_names_every_offer_and_its_cause(desk: Desk) -> None:
    cloud = desk.cloud()
    cloud.faults.create.extend(["no_capacity"] * 30)
    offers = [cloud.offer(region=f"r{n}") for n in range(30)]
    with pytest.raises(ProvisionError) as caught:
        desk.provisioner().provision(desk.lease(), desk.terms(offers))
    assert len(caught.value.attempts) == 30
    assert "none of 30 offers" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 13
    assert {a.code for a in caught.value.attempts} == {"CAPACITY_UNAVAILABLE"}


def test_a_request_that_every_cloud_refuses_ends_the_walk(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu_flows.clouds.errors import RequestRefused

    cloud = desk.cloud()

    def refuse(*_: object) -> None:
        cloud.calls["create"] += 1
        raise RequestRefused("the image does not exist")

    monkeypatch.setattr(cloud, "create", refuse)
    with pytest.raises(ProvisionError, match="image does not exist"):
        desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer(), cloud.offer(region="r2")]))
    assert cloud.calls["create"] == 1
    assert RequestRefused.default_scope is Scope.REQUEST


def test_an_interruption_during_the_create_keeps_the_record(desk: Desk) -> None:
    """C01, C03: the caller is interrupted while the create is on its way; the box is recorded all the same."""
    import _thread

    cloud = desk.cloud()
    cloud.after_create = lambda _: _thread.interrupt_main()
    with pytest.raises(KeyboardInterrupt):
        desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()]))
    assert len(cloud.live()) == 1
    assert [box.id for _, box in desk.journal().live_boxes()] == [cloud.live()[0].box.id]


def test_a_halt_is_the_last_resort_of_a_machine_that_is_rented_whole_and_of_no_other(desk: Desk) -> None:
    from gpu_flows.leases.deadman import HALT

    resorts: dict[str, str] = {}
    rented = desk.cloud("rented")
    own = desk.cloud("own", capabilities=Capabilities(whole_machine=False))
    for cloud in (rented, own):
        desk.clouds[:] = [cloud]
        owner = Owner(("cli", cloud.name))
        provisioner = desk.provisioner(owner)
        provisioner.renting._boot_script = lambda *_, last_resort, name=cloud.name, **__: resorts.setdefault(
            name, last_resort
        )
        provisioner.provision(desk.lease(owner=owner), desk.terms([cloud.offer()]))
    assert resorts == {"rented": HALT, "own": ""}


def test_c19_the_bill_of_a_box_that_was_too_dear_holds_its_actual_rate(desk: Desk) -> None:
    from dataclasses import replace

    from gpu_flows.leases.cost import cost_so_far

    cloud = desk.cloud()

    def dearer_when_it_runs(box: object) -> None:
        for record in cloud.book.values():
            record.box = replace(record.box, usd_per_hour=30.0)
        desk.clock.advance(3600)

    cloud.after_create = dearer_when_it_runs
    with pytest.raises(ProvisionError) as caught:
        desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()], price_cap=25))
    assert caught.value.code == "PRICE_TOO_HIGH"
    assert cost_so_far(desk.journal(), desk.clock.now()).usd == pytest.approx(30.0, rel=0.01)


def test_one_clouds_wrong_key_does_not_keep_another_from_being_waited_for(desk: Desk) -> None:
    bad, good = desk.cloud("bad"), desk.cloud("good")
    bad.faults.create.append("denied")
    good.faults.create.extend(["no_capacity", "ok"])
    lease, attempts = desk.provisioner().provision(
        desk.lease(), desk.terms([bad.offer(), good.offer()], wait_for_capacity=timedelta(minutes=30))
    )
    assert lease.boxes[0].box.cloud == "good"
    assert [a.code for a in attempts if a.tried] == ["AUTHENTICATION_FAILED", "CAPACITY_UNAVAILABLE", "OK"]
    assert bad.calls["create"] == 1, "a blocked cloud is not asked again before its block has expired"
