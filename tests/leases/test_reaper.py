from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_flows.clouds.base import BoxState
from gpu_flows.leases.journal import Journal, this_process
from gpu_flows.leases.lease import BoxName, Owner, lease_id, new_nonce
from gpu_flows.leases.liveness import JournalLiveness
from gpu_flows.leases.reaper import ReapFailed, Standing, reap, standing_of, survey
from tests.leases.conftest import NAMESPACE, OWNER, Desk
from tests.leases.test_lease import moments, names


def name_of(desk: Desk, *, expires_in_s: float, namespace: str = NAMESPACE, owner: Owner = OWNER) -> str:
    return str(
        BoxName(
            namespace=namespace,
            lease=lease_id(owner, namespace),
            node=0,
            created=desk.clock.now() - timedelta(hours=1),
            nonce=new_nonce(),
            deadline=desk.clock.now() + timedelta(seconds=expires_in_s),
        )
    )


def test_c07_only_exactly_ours_and_expired_is_reaped(desk: Desk) -> None:
    cloud = desk.cloud()
    expired = cloud.add(name_of(desk, expires_in_s=-1))
    held = cloud.add(name_of(desk, expires_in_s=60))
    cloud.add(name_of(desk, expires_in_s=-3600, namespace="team"), foreign=True)
    cloud.add(name_of(desk, expires_in_s=-3600, namespace="team12"), foreign=True)
    cloud.add("gpu-flows-demo", foreign=True)
    cloud.add(f"x-{name_of(desk, expires_in_s=-3600)}", foreign=True)
    cloud.add("postgres-1", foreign=True)
    seen = survey(desk.clouds, NAMESPACE, clock=desk.clock)
    assert {s.box.id: s.standing for s in seen.sightings if s.name and s.name.namespace == NAMESPACE} == {
        expired.id: Standing.EXPIRED,
        held.id: Standing.HELD,
    }
    assert [s.box.name for s in seen.sightings if s.standing is Standing.LOOK_ALIKE] == ["gpu-flows-demo"]
    assert sum(s.standing is Standing.OTHER for s in seen.sightings) == 2
    ended = reap(seen, desk.clouds, journals=desk.folder, clock=desk.clock)
    assert [box.id for box in ended] == [expired.id]


def test_a_survey_changes_nothing(desk: Desk) -> None:
    cloud = desk.cloud()
    cloud.add(name_of(desk, expires_in_s=-1))
    survey(desk.clouds, NAMESPACE, clock=desk.clock)
    assert cloud.calls["destroy"] == 0


@pytest.mark.parametrize(("wanted", "standing"), [(True, "held"), (False, "orphaned"), (None, "held")])
def test_an_owner_that_nobody_knows_is_never_taken_for_ended(
    desk: Desk, wanted: bool | None, standing: str
) -> None:
    cloud = desk.cloud()
    cloud.add(name_of(desk, expires_in_s=60))
    desk.wanted = wanted
    (sighting,) = survey(desk.clouds, NAMESPACE, liveness=desk, clock=desk.clock).sightings
    assert sighting.standing == standing


def test_c09_a_stopped_box_is_shown_as_billing_and_reaped(desk: Desk) -> None:
    cloud = desk.cloud()
    cloud.add(name_of(desk, expires_in_s=-1), state=BoxState.STOPPED)
    seen = survey(desk.clouds, NAMESPACE, clock=desk.clock)
    assert seen.sightings[0].to_json()["state"] == "stopped"
    assert len(reap(seen, desk.clouds, journals=desk.folder, clock=desk.clock)) == 1


def test_c05_a_cloud_that_cannot_be_listed_fails_the_reaper_after_the_rest(desk: Desk) -> None:
    sick, well = desk.cloud("sick"), desk.cloud("well")
    sick.faults.find.append("unexpected")
    box = well.add(name_of(desk, expires_in_s=-1))
    seen = survey(desk.clouds, NAMESPACE, clock=desk.clock)
    with pytest.raises(ReapFailed, match=r"sick.*deprecated_endpoint") as caught:
        reap(seen, desk.clouds, journals=desk.folder, clock=desk.clock)
    assert [ended.id for ended in caught.value.ended] == [box.id]


def test_c65_deadlines_are_judged_by_the_clouds_clock(desk: Desk) -> None:
    behind, ahead = desk.cloud("behind", skew_s=-200), desk.cloud("ahead", skew_s=200)
    for cloud in (behind, ahead):
        cloud.add(name_of(desk, expires_in_s=0))
    seen = survey(desk.clouds, NAMESPACE, clock=desk.clock)
    assert {s.cloud: s.standing for s in seen.sightings} == {
        "behind": Standing.HELD,
        "ahead": Standing.EXPIRED,
    }


def test_the_owner_that_rides_along_is_shown(desk: Desk) -> None:
    cloud = desk.cloud()
    desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer()]))
    (sighting,) = survey(desk.clouds, NAMESPACE, clock=desk.clock).sightings
    assert sighting.owner == OWNER
    desk.clock.advance(1800)
    (sighting,) = survey(desk.clouds, NAMESPACE, clock=desk.clock).sightings
    assert sighting.usd_so_far == pytest.approx(10.0)


@given(names, moments, st.sampled_from([True, False, None]))
def test_standing_is_decided_by_the_exact_name(name: BoxName, now: datetime, wanted: bool | None) -> None:
    standing = standing_of(str(name), name.namespace, now, wanted=wanted)
    assert standing is (
        Standing.EXPIRED if name.deadline <= now else Standing.ORPHANED if wanted is False else Standing.HELD
    )
    assert standing_of(str(name), name.namespace + "x", now, wanted=wanted) is Standing.OTHER
    assert standing_of(f"{name}x", name.namespace, now, wanted=False) is Standing.LOOK_ALIKE


def test_a_scope_whose_process_has_died_wants_nothing(tmp_path: Path) -> None:
    import subprocess

    liveness = JournalLiveness(tmp_path)
    lease = lease_id(OWNER, NAMESPACE)
    journal = Journal(tmp_path, NAMESPACE, lease)
    assert liveness.wants(OWNER, NAMESPACE, lease) is None
    holder = this_process(detached=False)
    journal.record("reserved", clouds=[], owner=list(OWNER.parts), holder=holder)
    assert liveness.wants(OWNER, NAMESPACE, lease) is True
    child = subprocess.Popen(["true"])
    child.wait()
    journal.record("reserved", clouds=[], owner=list(OWNER.parts), holder={**holder, "pid": child.pid})
    assert liveness.wants(OWNER, NAMESPACE, lease) is False
    journal.record(
        "reserved", clouds=[], owner=list(OWNER.parts), holder={**holder, "pid": child.pid, "host": "other"}
    )
    assert liveness.wants(OWNER, NAMESPACE, lease) is None
    journal.record(
        "reserved", clouds=[], owner=list(OWNER.parts), holder={**holder, "pid": child.pid, "detached": True}
    )
    assert liveness.wants(OWNER, NAMESPACE, lease) is None
