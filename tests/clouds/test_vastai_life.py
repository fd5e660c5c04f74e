"""Vast.ai with real boxes behind its instances: keys, the dead-man, whole runs, and the vendor's own SDK."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpu_flows import Installation, RunReport, run
from gpu_flows.clouds.base import Box, BoxState
from gpu_flows.clouds.vastai import VastaiCloud
from gpu_flows.clouds.vastai.boot import self_destruct
from gpu_flows.gpus.request import GpuRequest
from gpu_flows.leases.blocked import BlockedScopes
from gpu_flows.leases.deadman import boot_script
from gpu_flows.offers import OfferQuery
from gpu_flows.settings import Settings
from tests.clouds.contract import until
from tests.clouds.ssh_client import run as run_over_ssh
from tests.clouds.test_vastai_failures import KEY, spec
from tests.emulators.cards import environment_with
from tests.emulators.http import Reply, hang_up_after, instead
from tests.emulators.vastai import VastaiEmulator, ask

QUERY = OfferQuery(request=GpuRequest.parse("H100:8"))


@pytest.fixture
def emulator(tmp_path: Path) -> Iterator[VastaiEmulator]:
    with VastaiEmulator(tmp_path / "boxes", api_key=KEY) as running:
        yield running


@pytest.fixture
def cloud(emulator: VastaiEmulator) -> VastaiCloud:
    return VastaiCloud(api_key=KEY, base_url=emulator.url)


def running(cloud: VastaiCloud, box: Box) -> Box:
    until(lambda: cloud.describe(box).state is BoxState.RUNNING, "the box runs")
    return cloud.describe(box)


# The key


def test_the_key_rides_in_the_create_call_and_comes_back_when_it_vanishes(
    cloud: VastaiCloud, emulator: VastaiEmulator
) -> None:
    box = running(cloud, cloud.create(cloud.offers(QUERY)[0], spec()))
    home = emulator.home(emulator.book[box.id])
    assert home is not None
    keys = home / ".ssh" / "authorized_keys"
    until(lambda: keys.exists() and spec().ssh_public_key in keys.read_text(), "the key is there")
    assert keys.stat().st_mode & 0o777 == 0o600
    assert keys.parent.stat().st_mode & 0o777 == 0o700
    assert (home / ".no_auto_tmux").exists()
    keys.write_text("ssh-ed25519 AAAA somebody")  # without a newline, as tools leave it
    until(lambda: spec().ssh_public_key in keys.read_text().splitlines(), "the key is back", timeout_s=40)
    assert keys.read_text().splitlines()[0] == "ssh-ed25519 AAAA somebody"
    cloud.destroy(box)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "by the proxy"])
def test_ssh_answers(cloud: VastaiCloud, emulator: VastaiEmulator, direct: bool) -> None:
    emulator.shows_direct_ports = direct
    box = running(cloud, cloud.create(cloud.offers(QUERY)[0], spec()))
    assert box.endpoint is not None
    endpoint = replace(box.endpoint, host_key=emulator.host_key(box.id))
    assert run_over_ssh(endpoint, "echo $((6 * 7))").stdout == b"42\n"
    cloud.destroy(box)


# The end


def test_the_dead_man_ends_a_box_whose_owner_never_came(cloud: VastaiCloud, emulator: VastaiEmulator) -> None:
    deadline = datetime.now(UTC) + timedelta(seconds=2)
    mine = spec(deadline=deadline)
    text = boot_script(deadline, cloud.self_destruct(mine) or "", length_s=60, tick_s=1, retry_s=1)
    box = cloud.create(cloud.offers(QUERY)[0], replace(mine, boot_script=text))
    assert emulator.live()
    until(lambda: not emulator.live(), "the box has ended itself", timeout_s=30)
    assert cloud.describe(box).state is BoxState.GONE
    ends = [request for request in emulator.requests if request.method == "DELETE"]
    assert {request.path for request in ends} == {f"/api/v0/instances/{box.id}/"}
    assert {request.headers["authorization"] for request in ends} == {f"Bearer instance-key-{box.id}"}


def test_the_dead_man_goes_on_when_the_api_fails(cloud: VastaiCloud, emulator: VastaiEmulator) -> None:
    # Each attempt asks by curl, and once more by Python.
    emulator.fault("destroy", *[instead(500, {"success": False})] * 3)
    deadline = datetime.now(UTC) + timedelta(seconds=1)
    mine = spec(deadline=deadline)
    text = boot_script(deadline, cloud.self_destruct(mine) or "", length_s=60, tick_s=1, retry_s=1)
    cloud.create(cloud.offers(QUERY)[0], replace(mine, boot_script=text))
    until(lambda: not emulator.live(), "the box has ended itself", timeout_s=40)
    assert emulator.calls["destroy"] >= 4


def end_by(script: str, environment: dict[str, str], *before: str) -> int:
    """Run what the dead-man of a box would, and return its exit status."""
    command = [*before, "/bin/sh", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60)
    assert b"instance-key" not in done.stdout + done.stderr
    return done.returncode


def test_an_image_without_curl_ends_itself_by_python(
    cloud: VastaiCloud, emulator: VastaiEmulator, tmp_path: Path
) -> None:
    box = cloud.create(cloud.offers(QUERY)[0], spec())
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "python3").symlink_to(sys.executable)
    environment = {**emulator.environment(emulator.book[box.id]), "PATH": str(tools)}
    assert end_by(self_destruct(emulator.url), environment) == 0
    assert not emulator.live()


def test_over_ssh_the_key_of_the_instance_is_read_from_process_1(
    cloud: VastaiCloud, emulator: VastaiEmulator
) -> None:
    """A login has neither the id nor the key; a dead-man that is started again over SSH is such a one."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("a process 1 of its own takes root and unshare")
    box = cloud.create(cloud.offers(QUERY)[0], spec())
    environment = {**emulator.environment(emulator.book[box.id]), "PATH": os.environ["PATH"]}
    login = 'env -u CONTAINER_ID -u CONTAINER_API_KEY /bin/sh -c "$1"; exit $?'
    process_1 = ["unshare", "--pid", "--fork", "--mount-proc", "/bin/sh", "-c", login, "box"]
    done = subprocess.run(
        [*process_1, self_destruct(emulator.url)], env=environment, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert not emulator.live()


def test_c03_a_box_without_an_id_asks_for_nothing(cloud: VastaiCloud, emulator: VastaiEmulator) -> None:
    assert end_by(self_destruct(emulator.url), {"PATH": os.environ["PATH"]}) != 0
    assert emulator.requests == []


def test_the_key_of_an_instance_ends_no_other(cloud: VastaiCloud, emulator: VastaiEmulator) -> None:
    mine, other = (cloud.create(cloud.offers(QUERY)[0], spec()) for _ in range(2))
    environment = {
        **emulator.environment(emulator.book[mine.id]),
        "PATH": os.environ["PATH"],
        "CONTAINER_ID": other.id,
    }
    assert end_by(self_destruct(emulator.url), environment) != 0
    assert len(emulator.live()) == 2
    for box in (mine, other):
        cloud.destroy(box)


# The vendor's own SDK


def test_the_vendors_sdk_drives_the_emulator(cloud: VastaiCloud, emulator: VastaiEmulator) -> None:
    vastai = pytest.importorskip("vastai")
    sdk = vastai.VastAI(api_key=KEY, server_url=emulator.url, retry=1)
    offers = sdk.search_offers(query={"gpu_name": {"eq": "H100 SXM"}, "num_gpus": {"eq": 8}}, storage=100.0)
    assert [offer["id"] for offer in offers] == [1001]
    made = sdk.create_instance(
        1001,
        image="pytorch/pytorch",
        disk=100,
        label="gf1-sdk",
        env="-e TZ=UTC -p 8080:8080",
        onstart_cmd=f"# {spec().ssh_public_key}\n",
        ssh=True,
        direct=True,
        cancel_unavail=True,
    )
    assert made["success"] is True
    shown = sdk.show_instance(made["new_contract"])
    assert shown["label"] == "gf1-sdk"
    assert shown["extra_env"]["TZ"] == "UTC"
    # What the SDK has made, the adapter sees and ends; and the other way round.
    (box,) = cloud.find("gf1-sdk")
    assert box.id == str(made["new_contract"])
    ours = cloud.create(cloud.offers(QUERY)[0], spec())
    emulator.page_boxes = 1
    assert {row["label"] for row in sdk.show_instances()} == {"gf1-sdk", ours.name}
    assert sdk.destroy_instance(int(ours.id))["success"] is True
    assert cloud.describe(ours).state is BoxState.GONE
    cloud.destroy(box)
    assert sdk.show_instance(int(box.id)) is None
    assert sdk.show_instances() == []


def test_the_sdk_takes_the_emulators_refusals_for_what_they_are(emulator: VastaiEmulator) -> None:
    vastai = pytest.importorskip("vastai")
    import requests

    wrong = vastai.VastAI(api_key="wrong", server_url=emulator.url, retry=1)
    with pytest.raises(requests.HTTPError, match="404"):
        wrong.show_instances()
    sdk = vastai.VastAI(api_key=KEY, server_url=emulator.url, retry=1)
    with pytest.raises(requests.HTTPError, match="404"):
        sdk.create_instance(999, image="x")
    with pytest.raises(requests.HTTPError, match="404"):
        sdk.destroy_instance(7999999)


# All of it


@pytest.fixture
def here(emulator: VastaiEmulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installation]:
    """An installation that rents from the emulator, on whose boxes eight H100 are seen."""
    monkeypatch.setenv("GPU_FLOWS_HOME", str(tmp_path / "home"))
    emulator.image_environment = environment_with(tmp_path / "cards", "nvidia_h100", 8)
    settings = Settings(namespace="vasttest", state=tmp_path / "home")
    options = {"vastai": {"api_key": KEY, "base_url": emulator.url}}
    with Installation(settings, cloud_options=options) as installation:
        installation.blocked = BlockedScopes()
        yield installation


def run_one_step(here: Installation, folder: Path, **parameters: Any) -> RunReport:
    code = folder / "code"
    code.mkdir()
    (code / "train.sh").write_text("echo one step on $GPU_FLOWS_JOB_ID\n")
    return run(
        "train.sh",
        gpus="H100:8",
        clouds=["vastai"],
        code=code,
        max_duration="10m",
        installation=here,
        name=["cli", "vast"],
        **parameters,
    )


def codes(report: RunReport) -> list[str]:
    return [attempt.code for attempt in report.attempts]


def test_c13_a_whole_run_fails_over_trains_and_gives_back(
    emulator: VastaiEmulator, here: Installation, tmp_path: Path
) -> None:
    broken = ask(2, dph_base=11.0, breaks="Error response from daemon: OCI runtime create failed")
    emulator.asks = [ask(1, dph_base=10.0), broken, ask(3, dph_base=12.0)]
    # The cheapest has been taken meanwhile, the next one fails after it was accepted.
    emulator.fault("create", instead(410, {"success": False, "error": "no_such_ask", "msg": "gone"}))
    report = run_one_step(here, tmp_path)
    assert report.ok, report.sentence
    assert codes(report) == ["CAPACITY_UNAVAILABLE", "BOX_LOST", "OK"]
    assert "OCI runtime create failed" in report.attempts[1].reason
    assert report.left == []
    assert not emulator.live()
    rows = list(emulator.book.values())
    assert [row.data["machine_id"] for row in rows] == [40002, 40003]
    assert all(row.name.startswith("gf1-vasttest-") for row in rows)
    assert {ended.id: ended.usd_per_hour for ended in report.ended} == {
        row.id: pytest.approx(row.usd_per_hour) for row in rows
    }


def test_c11_a_whole_run_adopts_the_box_of_a_create_that_was_cut_off(
    emulator: VastaiEmulator, here: Installation, tmp_path: Path
) -> None:
    emulator.fault("create", hang_up_after)
    emulator.list_lag_polls = 1
    theirs = emulator.foreign("gf1-vasttes")
    report = run_one_step(here, tmp_path)
    assert report.ok, report.sentence
    assert codes(report) == ["OK"]
    assert emulator.calls["create"] == 1
    assert not emulator.live()
    assert theirs.ended_at is None


def test_c19_a_box_that_is_dearer_than_it_was_offered_goes_back(
    emulator: VastaiEmulator, here: Installation, tmp_path: Path
) -> None:
    emulator.asks = [ask(1, dph_base=10.0), ask(2, dph_base=11.0)]

    def dearer(operation: Callable[[], Reply]) -> Reply:
        emulator.asks[0]["dph_base"] = 15.0
        return operation()

    emulator.fault("create", dearer)
    report = run_one_step(here, tmp_path, price_cap=12.0)
    assert report.ok, report.sentence
    assert codes(report) == ["PRICE_TOO_HIGH", "OK"]
    assert "15.0" in report.attempts[0].reason
    assert not emulator.live()


def test_c01_what_was_rented_goes_when_the_next_call_is_denied(
    emulator: VastaiEmulator, here: Installation, tmp_path: Path
) -> None:
    emulator.fault("show", instead(404, {"success": False, "error": "auth_error", "msg": "denied"}))
    report = run_one_step(here, tmp_path)
    assert not report.ok
    assert codes(report) == ["AUTHENTICATION_FAILED"]
    assert "denied" in report.attempts[0].reason
    assert emulator.calls["create"] == 1
    assert not emulator.live()
