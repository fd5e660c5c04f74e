from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta

import pytest

from gpu_flows.leases.cost import Cost, cost_of, cost_of_ended, cost_so_far
from gpu_flows.leases.ending import EndedBox
from gpu_flows.leases.teardown import teardown
from tests.leases.conftest import NAMESPACE, OWNER, Desk

TEN = datetime(2026, 6, 1, 10, tzinfo=UTC)


def ended(exact: bool = True) -> EndedBox:
    return EndedBox(
        cloud="aws",
        id="i-1",
        name="n",
        usd_per_hour=2.4,
        created_at=TEN,
        ended_at=TEN + timedelta(minutes=30),
        exact=exact,
    )


def test_c63_a_box_that_ended_by_itself_costs_the_same_at_every_later_look() -> None:
    assert cost_of_ended([ended()]) == Cost(pytest.approx(1.2), exact=True)
    assert str(cost_of_ended([ended()])) == "$1.20"


def test_c63_an_end_that_nobody_saw_is_shown_as_a_bound() -> None:
    assert str(cost_of_ended([ended(exact=False)])) == "<= $1.20, unverified"


def test_c63_the_journal_remembers_the_end_for_every_later_run(desk: Desk) -> None:
    cloud = desk.cloud()
    desk.provisioner().provision(desk.lease(), desk.terms([cloud.offer(usd_per_hour=2.4)]))
    desk.clock.advance(1800)
    running = cost_so_far(desk.journal(), desk.clock.now())
    assert running.usd == pytest.approx(1.2, rel=0.01)
    assert not running.exact
    teardown(OWNER, NAMESPACE, desk.clouds, journal=desk.journal(), clock=desk.clock)
    first = cost_so_far(desk.journal(), desk.clock.now())
    desk.clock.advance(4 * 3600)
    assert cost_so_far(desk.journal(), desk.clock.now()) == first
    assert first.exact
    assert first.usd == pytest.approx(1.2, rel=0.01)


@pytest.mark.parametrize("zone", ["Asia/Kolkata", "America/Los_Angeles", "Europe/Paris", "UTC"])
def test_c65_ages_and_costs_are_right_in_every_time_zone(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from zoneinfo import ZoneInfo

    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        # 01:30 to 04:30 in Paris over the end of summer time: three hours on the wall, four on the bill.
        paris = ZoneInfo("Europe/Paris")
        began = datetime(2026, 10, 25, 1, 30, tzinfo=paris)
        end = datetime(2026, 10, 25, 4, 30, tzinfo=paris).astimezone(UTC)
        assert cost_of(1.0, began.astimezone(UTC), end, exact=True).usd == pytest.approx(4.0)
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()
    assert "TZ" not in os.environ


@pytest.mark.parametrize(
    ("seconds", "step_s", "minimum_minutes", "usd"),
    [
        (1, 1, 0, 1 / 3600),
        (1, 60, 0, 60 / 3600),
        (61, 60, 0, 120 / 3600),
        (1, 3600, 0, 1.0),
        (60, 1, 60, 1.0),
    ],
)
def test_bills_are_rounded_up(seconds: float, step_s: int, minimum_minutes: int, usd: float) -> None:
    cost = cost_of(
        1.0,
        TEN,
        TEN + timedelta(seconds=seconds),
        exact=True,
        billing_step_s=step_s,
        minimum_minutes=minimum_minutes,
    )
    assert cost.usd == pytest.approx(usd)


def test_an_unknown_price_is_never_called_exact() -> None:
    assert not cost_of(None, TEN, TEN, exact=True).exact
