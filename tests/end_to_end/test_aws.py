"""Whole runs on AWS: the emulator of its APIs, with real boxes behind the instances."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpu_flows import Following, Installation, run
from gpu_flows.clouds.aws import AwsCloud
from gpu_flows.clouds.base import BoxSpec
from gpu_flows.gpus.request import GpuRequest
from gpu_flows.leases.deadman import boot_script
from gpu_flows.offers import Offer, OfferQuery
from tests.clouds.aws_account import opened, share_models
from tests.clouds.contract import box_name
from tests.clouds.ssh_client import PUBLIC_KEY
from tests.emulators.aws import KEY_ID, SECRET, AwsEmulator, refuse
from tests.end_to_end.conftest import Machine, until


@pytest.fixture(scope="module", autouse=True)
def _models() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        share_models(patch)
        yield


@pytest.fixture
def emulator(tmp_path: Path) -> Iterator[AwsEmulator]:
    with AwsEmulator(tmp_path / "instances") as emulator:
        yield emulator
        until(lambda: not emulator.live(), "nothing bills")


def options(emulator: AwsEmulator) -> dict[str, Any]:
    return {
        "access_key_id": KEY_ID,
        "secret_access_key": SECRET,
        "base_url": emulator.url,
        "ssh_port": emulator.ssh_port,
    }


def test_a_run_rents_trains_and_gives_back(
    machine: Machine, emulator: AwsEmulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_FLOWS_NAMESPACE", "team1")
    theirs = emulator.stranger("somebody-elses")
    # The first zone is sold out, whatever it offers.
    emulator.fault("RunInstances", refuse("InsufficientInstanceCapacity", "We have none", 500))
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.sh").write_text("echo training on $(nvidia-smi | wc -l) card\n")
    lines: list[str] = []
    with Installation(cloud_options={"aws": options(emulator)}) as here:
        report = run(
            "train.sh",
            code=code,
            gpus="T4:1",
            clouds=["aws"],
            regions=["us-east-1", "us-west-2"],
            max_duration="10m",
            launcher="command",
            installation=here,
            following=Following(show_line=lambda _, line: lines.append(line)),
        )
    assert report.ok, report.sentence
    assert lines[-1] == "training on 1 card"
    assert [attempt.code for attempt in report.attempts] == ["CAPACITY_UNAVAILABLE", "OK"]
    assert report.left == []
    (row,) = [row for row in emulator.book.values() if not row.foreign]
    assert row.ended_at is not None
    assert theirs.ended_at is None
    told = repr([(request.path, request.query, request.body) for request in emulator.requests])
    assert SECRET not in told + str(report) + "".join(lines)
    stored = [path.read_bytes() for path in machine.home.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in data for data in stored)


def test_a_box_that_nobody_looks_after_ends_itself_at_its_deadline(emulator: AwsEmulator) -> None:
    """What holds when the owner died in the moment of the create: the dead-man came along with it."""
    cloud = opened(emulator)
    wanted = nobodys(seconds=2)
    end = cloud.self_destruct(wanted)
    assert end is not None
    boot = boot_script(wanted.deadline, end, length_s=2, tick_s=0.2, retry_s=1)
    cloud.create(offer_of(cloud), replace(wanted, boot_script=boot))
    until(lambda: not emulator.live(), "the box has ended itself")
    assert datetime.now(UTC) >= wanted.deadline.replace(microsecond=0)
    assert emulator.calls["TerminateInstances"] == 0


def test_a_box_without_its_dead_man_is_halted_by_the_timer_of_its_system(emulator: AwsEmulator) -> None:
    """The user data schedules the halt for a minute past the deadline, whatever the login user does."""
    cloud = opened(emulator)
    cloud.create(offer_of(cloud), nobodys(seconds=-58))
    until(lambda: not emulator.live(), "the timer has halted the box")
    assert emulator.calls["TerminateInstances"] == 0


def nobodys(*, seconds: float) -> BoxSpec:
    return BoxSpec(
        name=box_name(),
        nonce="00000000",
        owner='["cli","nobody"]',
        ssh_public_key=PUBLIC_KEY,
        deadline=datetime.now(UTC) + timedelta(seconds=seconds),
    )


def offer_of(cloud: AwsCloud) -> Offer:
    offers = cloud.offers(OfferQuery(request=GpuRequest.parse("g4dn.xlarge")))
    return next(offer for offer in offers if offer.unavailable is None)
