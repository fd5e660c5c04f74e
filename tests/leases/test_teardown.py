"""Teardown knows nothing but the owner; whatever the clouds answer, it claims only what it has seen."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from gpu_flows.clouds.base import BoxState
from gpu_flows.leases.journal import Journal
from gpu_flows.leases.lease import BoxName, Owner, lease_id, new_nonce
from gpu_flows.leases.teardown import TeardownFailed, TeardownReport, teardown
from tests.leases.conftest import NAMESPACE, OWNER, Desk


def name_of(
    desk: Desk, *, node: int = 0, age_s: float = 60, namespace: str = NAMESPACE, owner: Owner = OWNER
) -> str:
    created = desk.clock.now() - timedelta(seconds=age_s)
    return str(
        BoxName(
            namespace=namespace,
            lease=lease_id(owner, namespace),
            node=node,
            created=created,
            nonce=new_nonce(),
            deadline=created + timedelta(hours=5),
        )
    )


def tear_down(desk: Desk, **kwargs: object) -> TeardownReport:
    options: dict[str, object] = {"journal": desk.journal(), "clock": desk.clock, "timeout_s": 300, **kwargs}
    return teardown(OWNER, NAMESPACE, desk.clouds, **options)  # type: ignore[arg-type]


def test_c03_every_box_is_found_by_the_owner_alone_in_every_state(desk: Desk) -> None:
    one, two = desk.cloud("one"), desk.cloud("two")
    for node, state in enumerate((BoxState.STARTING, BoxState.RUNNING, BoxState.STOPPED, BoxState.FAILED)):
        one.add(name_of(desk, node=node), state=state)
    two.add(name_of(desk, node=0))
    report = tear_down(desk)
    assert len(report.ended) == 5
    assert all(box.exact for box in report.ended)
    assert one.live() == two.live() == []


def test_repeating_it_is_a_success_that_does_nothing(desk: Desk) -> None:
    cloud = desk.cloud()
    cloud.add(name_of(desk))
    assert len(tear_down(desk).ended) == 1
    assert tear_down(desk).ended == ()
    assert cloud.calls["destroy"] == 1


def test_c07_nobody_elses_box_is_touched(desk: Desk) -> None:
    cloud = desk.cloud()
    cloud.add(name_of(desk, namespace="team"), foreign=True)
    cloud.add(name_of(desk, namespace="team12"), foreign=True)
    cloud.add(name_of(desk, owner=Owner(("cli", "nightly-8"))), foreign=True)
    cloud.add(name_of(desk) + "-copy", foreign=True)
    cloud.add("gpu-flows-demo", foreign=True)
    mine = cloud.add(name_of(desk))
    assert [box.id for box in tear_down(desk).ended] == [mine.id]


def test_a_box_of_a_later_attempt_stays(desk: Desk) -> None:
    cloud = desk.cloud()
    later = cloud.add(name_of(desk, age_s=-120))
    earlier = cloud.add(name_of(desk, age_s=120))
    assert [box.id for box in tear_down(desk).ended] == [earlier.id]
    assert cloud.book[later.id].ended_at is None


@pytest.mark.parametrize("faults", [["fails"] * 3, ["ignored"] * 2, ["fails", "ignored", "fails"]])
def test_a_delete_that_fails_or_shows_no_effect_is_sent_again(desk: Desk, faults: list[str]) -> None:
    cloud = desk.cloud()
    cloud.faults.destroy.extend(faults)
    cloud.add(name_of(desk))
    assert len(tear_down(desk).ended) == 1
    assert cloud.live() == []


def test_what_cannot_be_ended_is_an_error_that_names_it(desk: Desk) -> None:
    cloud = desk.cloud()
    cloud.faults.destroy.extend(["fails"] * 1000)
    stuck = cloud.add(name_of(desk))
    with pytest.raises(TeardownFailed) as caught:
        tear_down(desk, timeout_s=60)
    assert stuck.id in str(caught.value)
    assert "console.invalid" in str(caught.value)


@pytest.mark.parametrize("fault", ["unexpected", "denied", "unreachable"])
def test_c05_an_unknown_listing_is_never_taken_for_empty(desk: Desk, fault: str) -> None:
    sick, well = desk.cloud("sick"), desk.cloud("well")
    sick.faults.find.extend([fault] * 1000)
    sick.add(name_of(desk))
    well.add(name_of(desk))
    with pytest.raises(TeardownFailed, match="sick cannot be asked") as caught:
        tear_down(desk, timeout_s=60)
    assert len(caught.value.ended) == 1, "everything else is tried all the same"
    assert well.live() == []


def test_a_cloud_that_recovers_is_asked_again(desk: Desk) -> None:
    cloud = desk.cloud()
    cloud.faults.find.extend(["unreachable"] * 5)
    cloud.add(name_of(desk))
    assert len(tear_down(desk).ended) == 1


def test_a_cloud_where_nothing_can_have_been_sent_does_not_fail_it(desk: Desk) -> None:
    used, unused = desk.cloud("used"), desk.cloud("unused")
    desk.journal().record("reserved", clouds=["used"], owner=list(OWNER.parts), holder={})
    unused.faults.find.extend(["denied"] * 1000)
    used.add(name_of(desk))
    report = tear_down(desk)
    assert len(report.ended) == 1
    assert "unused" in report.not_asked[0]


def test_a_cloud_that_the_journal_names_must_be_looked_at(desk: Desk) -> None:
    desk.journal().record("intent", cloud="runpod@team_a", name=name_of(desk))
    desk.cloud("other")
    with pytest.raises(TeardownFailed, match="runpod@team_a was not looked at"):
        tear_down(desk)


def test_an_open_intent_is_waited_out(desk: Desk) -> None:
    """The process was killed between sending the create and its answer; the listing lags behind."""
    cloud = desk.cloud()
    name = name_of(desk, age_s=10)
    desk.journal().record("intent", cloud="memory", name=name)
    box = cloud.add(name)
    cloud.book[box.id].born_at_poll = 0
    cloud.faults.list_lag_polls = 8
    report = tear_down(desk, sole_creator=True)
    assert [ended.id for ended in report.ended] == [box.id]


def test_a_box_that_the_listing_does_not_show_yet_is_ended_by_its_id(desk: Desk) -> None:
    cloud = desk.cloud()
    cloud.faults.list_lag_polls = 1000
    lease, _ = desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()]))
    report = tear_down(desk, sole_creator=True)
    assert [ended.id for ended in report.ended] == [lease.boxes[0].box.id]
    assert cloud.live() == []


def test_without_a_create_there_is_nothing_to_wait_for(desk: Desk) -> None:
    desk.cloud()
    assert tear_down(desk, sole_creator=True).ended == ()
    assert not desk.clock.slept


def test_a_create_of_another_machine_may_be_too_young_to_be_listed(desk: Desk) -> None:
    cloud = desk.cloud()
    box = cloud.add(name_of(desk, age_s=5))
    cloud.book[box.id].born_at_poll = 0
    cloud.faults.list_lag_polls = 8
    assert len(tear_down(desk).ended) == 1


def test_what_another_machine_may_have_created_is_waited_for_as_long_as_a_listing_lags(desk: Desk) -> None:
    cloud = desk.cloud()
    assert tear_down(desk).ended == ()
    assert sum(desk.clock.slept) == pytest.approx(cloud.capabilities.lag_s)


def test_two_teardowns_at_once_agree(desk: Desk) -> None:
    cloud = desk.cloud()
    for node in range(8):
        cloud.add(name_of(desk, node=node))
    reports: list[TeardownReport] = []
    threads = [threading.Thread(target=lambda: reports.append(tear_down(desk))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(reports) == 4
    assert cloud.live() == []


def test_c63_an_end_that_nobody_saw_is_an_upper_bound(desk: Desk) -> None:
    cloud = desk.cloud(tells_end=False)
    cloud.add(name_of(desk))
    (ended,) = tear_down(desk).ended
    assert not ended.exact
    assert Journal(desk.folder, NAMESPACE, lease_id(OWNER, NAMESPACE)).ended() == {ended.name: ended.ended_at}


def test_a_hundred_boxes_are_ended_at_once(desk: Desk) -> None:
    cloud = desk.cloud()
    for node in range(100):
        cloud.add(name_of(desk, node=node))
    assert len(tear_down(desk).ended) == 100
    assert cloud.calls["find"] <= 4
