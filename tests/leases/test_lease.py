from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_flows.errors import BadRequest
from gpu_flows.leases.lease import (
    BoxName,
    Lease,
    Owner,
    boxes_of,
    deadline_of,
    lease_id,
    lease_prefix,
    new_nonce,
)
from tests.emulators.clock import FakeClock
from tests.emulators.memory import MemoryCloud

namespaces = st.from_regex(r"[a-z0-9]{1,16}", fullmatch=True)
moments = st.datetimes(datetime(2000, 1, 1), datetime(2200, 1, 1)).map(
    lambda d: d.replace(tzinfo=UTC, microsecond=0)
)
names = st.builds(
    BoxName,
    namespace=namespaces,
    lease=st.from_regex(r"[a-z2-7]{12}", fullmatch=True),
    node=st.integers(0, 99),
    created=moments,
    nonce=st.from_regex(r"[a-z2-7]{8}", fullmatch=True),
    deadline=moments,
)


@given(names)
def test_a_name_is_short_and_parsed_exactly(name: BoxName) -> None:
    text = str(name)
    assert len(text) <= 63
    assert BoxName.parse(text) == name
    for wrong in (text[:-1], text + "a", " " + text, text.upper() + "!", "x" + text, text + "\n"):
        assert BoxName.parse(wrong) is None


@given(st.text(max_size=80))
def test_no_text_breaks_the_parser(text: str) -> None:
    parsed = BoxName.parse(text)
    assert parsed is None or str(parsed) == text


@given(st.lists(st.text(min_size=1), min_size=1, max_size=5), namespaces)
def test_an_owner_survives_its_text_and_names_one_lease(parts: list[str], namespace: str) -> None:
    owner = Owner(tuple(parts))
    assert Owner.parse(str(owner)) == owner
    assert lease_id(owner, namespace) == lease_id(Owner.parse(str(owner)), namespace)


def test_installations_and_owners_never_share_a_lease() -> None:
    owners = [
        Owner(("airflow", "dag", "run", "task", "-1")),
        Owner(("airflow", "dag", "run-task", "-1")),
        Owner(("cli", "x")),
    ]
    ids = {lease_id(owner, namespace) for owner in owners for namespace in ("a", "b", "ab")}
    assert len(ids) == 9


def test_a_bare_name_is_an_owner_of_the_command_line() -> None:
    assert Owner.parse(" nightly ") == Owner(("cli", "nightly"))


@pytest.mark.parametrize("text", ["", "[", "[1]", '["a", ""]', "[]", '["a", null]'])
def test_a_malformed_owner_is_refused(text: str) -> None:
    with pytest.raises(BadRequest):
        Owner.parse(text)


def test_prefixes_of_one_another_are_told_apart() -> None:
    clock = FakeClock()
    cloud = MemoryCloud(clock)
    for namespace in ("team", "team1", "eam1"):
        for node in (1, 10):
            lease = lease_id(Owner(("cli", "x")), namespace)
            cloud.add(
                str(
                    BoxName(
                        namespace=namespace,
                        lease=lease,
                        node=node,
                        created=clock.now(),
                        nonce=new_nonce(),
                        deadline=clock.now(),
                    )
                )
            )
    mine = lease_id(Owner(("cli", "x")), "team")
    found = boxes_of(cloud.find(lease_prefix("team", mine)[:6]), "team", mine)
    assert [name.node for name, _ in found] in ([1, 10], [10, 1])
    assert {name.namespace for name, _ in found} == {"team"}


def test_a_deadline_holds_the_wait_the_job_and_the_slack() -> None:
    created = datetime(2026, 6, 1, tzinfo=UTC)
    deadline = deadline_of(created, ready_timeout_s=600, max_duration=timedelta(hours=2))
    assert deadline - created == timedelta(hours=2, minutes=25)


def test_a_handle_survives_json() -> None:
    import json

    from gpu_flows.leases.lease import LeasedBox

    clock = FakeClock()
    cloud = MemoryCloud(clock)
    lease = Lease(owner=Owner(("cli", "x")), namespace="a", clouds=("memory",))
    name = BoxName(
        namespace="a", lease=lease.id, node=0, created=clock.now(), nonce=new_nonce(), deadline=clock.now()
    )
    held = lease.with_boxes(
        [LeasedBox(node=0, box=cloud.add(str(name)), offer=cloud.offer(), created_at=clock.now())]
    )
    assert Lease.from_json(json.loads(json.dumps(held.to_json()))) == held
    assert held.deadline == clock.now()
    assert held.usd_per_hour == 20.0
