"""A cloud that takes no name in the create call: an unnamed box is told of, and never touched on a guess."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_flows.clouds.base import Capabilities
from gpu_flows.leases.ending import NotProvenGone
from gpu_flows.leases.journal import INTENT
from gpu_flows.leases.provision import ProvisionError
from gpu_flows.leases.reaper import Standing, reap, survey
from gpu_flows.leases.teardown import TeardownFailed, TeardownReport, teardown
from tests.emulators.memory import MemoryCloud
from tests.leases.conftest import NAMESPACE, OWNER, Desk

LATE_NAMES = Capabilities(names_at_create=False, lag_s=330, ready_timeout_s=600)


@pytest.fixture
def cloud(desk: Desk) -> MemoryCloud:
    return desk.cloud("late", capabilities=LATE_NAMES)


def tear_down(desk: Desk, **options: object) -> TeardownReport:
    settings: dict[str, object] = {"journal": desk.journal(), "clock": desk.clock, **options}
    return teardown(OWNER, NAMESPACE, desk.clouds, **settings)  # type: ignore[arg-type]


def ids(cloud: MemoryCloud) -> list[str]:
    return [record.box.id for record in cloud.book.values() if record.ended_at is None]


def test_what_was_there_before_is_written_down_before_the_create(desk: Desk, cloud: MemoryCloud) -> None:
    stranger = cloud.add("", foreign=True)
    desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()]))
    (intent,) = [entry for entry in desk.journal().entries() if entry["event"] == INTENT]
    assert intent["unnamed"] == [stranger.id]


def test_a_box_that_may_be_ours_is_named_and_not_touched_and_the_next_cloud_serves(
    desk: Desk, cloud: MemoryCloud
) -> None:
    other = desk.cloud("other")
    stranger = cloud.add("", foreign=True)
    cloud.faults.create.append("unnamed_after")
    lease, attempts = desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer(), other.offer()]))
    assert [attempt.code for attempt in attempts] == ["SUSPECTED_LEAK", "OK"]
    (born,) = [box_id for box_id in ids(cloud) if box_id != stranger.id]
    assert born in attempts[0].reason
    assert stranger.id not in attempts[0].reason
    assert cloud.calls["destroy"] == 0
    assert [leased.box.cloud for leased in lease.boxes] == ["other"]
    assert sum(desk.clock.slept) >= LATE_NAMES.lag_s


@pytest.mark.parametrize("strangers", [0, 2])
def test_an_ambiguous_create_after_which_nothing_new_is_there_made_nothing(
    desk: Desk, cloud: MemoryCloud, strangers: int
) -> None:
    for _ in range(strangers):
        cloud.add("", foreign=True)
    cloud.faults.create.append("unreachable_before")
    walk = [cloud.offer(), cloud.offer(region="r2")]
    _, attempts = desk.provisioner().provision(desk.lease(), desk.terms(walk))
    assert [attempt.code for attempt in attempts] == ["CLOUD_UNREACHABLE", "OK"]
    assert desk.journal().unsettled() == []


def test_a_listing_that_fails_at_the_last_look_is_a_suspicion_too(desk: Desk, cloud: MemoryCloud) -> None:
    cloud.faults.create.append("unreachable_before")
    # Two looks for what an earlier attempt left, one for what is unnamed; from then on nothing can be listed.
    cloud.faults.find.extend([*["ok"] * 3, *["unreachable"] * 60])
    with pytest.raises(ProvisionError) as told:
        desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()]))
    assert told.value.code == "SUSPECTED_LEAK"


def test_teardown_fails_until_somebody_has_looked_at_the_suspect(desk: Desk, cloud: MemoryCloud) -> None:
    cloud.faults.create.append("unnamed_after")
    with pytest.raises(ProvisionError):
        desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()]))
    (born,) = ids(cloud)
    for _ in range(2):
        with pytest.raises(TeardownFailed, match=f"without a name, {born}, since a create"):
            tear_down(desk)
    assert cloud.calls["destroy"] == 0
    record = cloud.book[born]
    record.box = replace(record.box, name="the box of somebody else")
    assert tear_down(desk).ended == ()
    cloud.add("", foreign=True)  # Settled is settled: what comes later is nobody's suspect.
    assert tear_down(desk).ended == ()


def test_c03_killed_between_the_create_and_the_name_leaves_a_suspect(desk: Desk, cloud: MemoryCloud) -> None:
    lease, terms = desk.lease(), desk.terms([])
    renting = desk.provisioner().renting
    _, spec = renting._spec(cloud, lease, 0, terms)
    renting._intend(cloud, spec)
    born = cloud.add("")  # made, and its maker is dead
    with pytest.raises(TeardownFailed, match=born.id):
        tear_down(desk)
    assert sum(desk.clock.slept) >= LATE_NAMES.lag_s
    cloud.destroy(born)
    assert tear_down(desk).ended == ()


def test_a_box_that_cannot_be_given_its_name_is_ended_by_its_id(desk: Desk, cloud: MemoryCloud) -> None:
    cloud.faults.create.append("unnameable")
    offer = cloud.offer(minimum_minutes=60)
    with pytest.raises(ProvisionError):
        desk.provisioner().provision(desk.lease(), desk.terms([offer]))
    assert ids(cloud) == []
    (gone,) = [entry["record"] for entry in desk.journal().entries() if entry["event"] == "gone"]
    assert gone["minimum_minutes"] == 60, "the least charge of a failed attempt stands"
    assert gone["created_at"]


def test_one_that_cannot_be_ended_either_is_ended_by_a_later_teardown(desk: Desk, cloud: MemoryCloud) -> None:
    cloud.faults.create.append("unnameable")
    cloud.faults.destroy.extend(["fails"] * 200)
    with pytest.raises(NotProvenGone):
        desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()]))
    (born,) = ids(cloud)
    cloud.faults.destroy.clear()
    assert [ended.id for ended in tear_down(desk).ended] == [born]


def test_a_teardown_that_ends_before_the_lag_has_proven_nothing(desk: Desk, cloud: MemoryCloud) -> None:
    renting = desk.provisioner().renting
    _, spec = renting._spec(cloud, desk.lease(), 0, desk.terms([]))
    renting._intend(cloud, spec)
    with pytest.raises(TeardownFailed, match="may list a box of a late create"):
        tear_down(desk, timeout_s=100)
    assert tear_down(desk, timeout_s=600).ended == ()
    assert desk.journal().unsettled() == []


def test_a_full_disk_rents_nothing_where_the_journal_alone_could_tell(desk: Desk, cloud: MemoryCloud) -> None:
    desk.folder.write_text("a file where the folder should be")
    with pytest.raises(ProvisionError, match="without a journal"):
        desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()]))
    assert cloud.calls["create"] == 0


def test_c07_the_reaper_shows_boxes_without_a_name_and_leaves_them(desk: Desk, cloud: MemoryCloud) -> None:
    plain = desk.cloud("plain")
    stranger = cloud.add("", foreign=True)
    plain.add("", foreign=True)
    cloud.add("somebody-elses", foreign=True)
    found = survey(desk.clouds, NAMESPACE, clock=desk.clock)
    assert [(seen.box.id, seen.standing) for seen in found.sightings] == [(stranger.id, Standing.UNNAMED)]
    assert reap(found, desk.clouds, journals=desk.folder, clock=desk.clock) == []
