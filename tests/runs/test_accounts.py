"""What ``gpu-flows check`` finds out, without renting anything."""

from __future__ import annotations

import pytest

from gpu_flows import BadRequest, Installation
from gpu_flows.clouds import CLOUDS
from gpu_flows.runs.accounts import check_accounts
from tests.emulators.clock import FakeClock
from tests.emulators.memory import MemoryCloud
from tests.end_to_end.conftest import Machine, machine

__all__ = ["machine"]

CLOUD: list[MemoryCloud] = []


def open_invented(account: str = "default") -> MemoryCloud:
    return CLOUD[0]


@pytest.fixture
def invented(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> MemoryCloud:
    monkeypatch.setitem(CLOUDS, "invented", f"{__name__}:open_invented")
    monkeypatch.setenv("GPU_FLOWS_NAMESPACE", "team1")
    CLOUD[:] = [MemoryCloud(FakeClock(), "invented")]
    return CLOUD[0]


def test_an_account_in_order_is_said_to_be(invented: MemoryCloud) -> None:
    (found,) = check_accounts(["invented"], Installation())
    assert (found.ok, found.boxes, found.stops) == (True, 0, ())
    assert invented.calls["create"] == 0
    (local,) = check_accounts(["local"], Installation())
    assert local.ok


@pytest.mark.parametrize(
    ("fault", "part"),
    [("denied", "401"), ("unexpected", "deprecated_endpoint"), ("unreachable", "timed out")],
)
def test_what_the_cloud_says_stops_a_run(invented: MemoryCloud, fault: str, part: str) -> None:
    invented.faults.find.append(fault)
    (found,) = check_accounts(["invented"], Installation())
    assert not found.ok
    assert found.boxes is None
    assert part in found.stops[0]


def test_what_this_machine_lacks_stops_a_run(invented: MemoryCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPU_FLOWS_NAMESPACE")
    invented.skew_s = 4000.0
    monkeypatch.setattr(MemoryCloud, "identity_secrets", lambda self: ())
    found = check_accounts(["invented"], Installation())[0]
    assert "no namespace" in found.stops[0]
    assert "clock" in found.stops[-1]
    monkeypatch.setenv("GPU_FLOWS_NAMESPACE", "team1")
    found = check_accounts(["invented"], Installation())[0]
    assert "GPU_FLOWS_SSH_KEY" in found.stops[0]


def test_a_cloud_that_does_not_exist_is_bad_input(invented: MemoryCloud) -> None:
    with pytest.raises(BadRequest):
        check_accounts(["invnted"], Installation())
