"""The watchdog beside a real owner process, on boxes of the local cloud."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_flows.clouds import open_cloud
from gpu_flows.clouds.base import Cloud
from gpu_flows.leases.journal import process_start

OWNER = """
import sys, time, os
from pathlib import Path
from gpu_flows.clouds import open_cloud
from gpu_flows.leases.journal import Journal
from gpu_flows.leases.lease import Lease, Owner
from gpu_flows.leases.provision import Provisioner, Terms
from gpu_flows.leases.watchdog import start_watchdog
from tests.emulators.memory import query

home = Path(os.environ["GPU_FLOWS_HOME"])
lease = Lease(owner=Owner(("cli", "watched")), namespace="w", clouds=("local",))
dog = start_watchdog(lease, clouds=[{"ref": "local"}], journals=home / "journal", log=home / "dog.log")
cloud = open_cloud("local")
Provisioner(
    [cloud],
    journal=Journal(home / "journal", "w", lease.id),
    public_key=lambda _: "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDhP0wmBVzCKF5Zx0SPy6G1ZqwXvIcGkEMa1AbZlB0HO",
    boot_script=lambda *_, **__: "",
    check=lambda box, offer, *, timeout_s: (box.endpoint, {}),
).provision(lease, Terms(query=query("cpu"), offers=lambda: cloud.offers(query("cpu"))))
if "fork" in sys.argv and os.fork() == 0:
    time.sleep(60)
    os._exit(0)
print(dog.pid, flush=True)
if "disarm" in sys.argv:
    dog.disarm()
    sys.exit(0)
time.sleep(60)
"""


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    monkeypatch.setenv("GPU_FLOWS_HOME", str(tmp_path))
    cloud = open_cloud("local")
    yield cloud
    for box in cloud.find("gf1-"):
        cloud.destroy(box)


def owner(*args: str) -> tuple[subprocess.Popen[bytes], int]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, *args],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def until_gone(cloud: Cloud, pid: int, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while cloud.find("gf1-") or process_start(pid) is not None:
        assert time.monotonic() < deadline, "the watchdog did not tear down"
        time.sleep(0.2)


def test_a_killed_owner_is_torn_down_after(cloud: Cloud, tmp_path: Path) -> None:
    process, dog = owner()
    assert len(cloud.find("gf1-w-")) == 1
    process.kill()
    process.wait()
    until_gone(cloud, dog)
    assert "nothing is left" in (tmp_path / "dog.log").read_text()


def test_a_whole_killed_session_does_not_take_the_watchdog_along(cloud: Cloud) -> None:
    process, dog = owner()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    until_gone(cloud, dog)


def test_a_child_that_holds_the_pipe_open_does_not_hide_the_death(cloud: Cloud) -> None:
    process, dog = owner("fork")
    process.kill()
    process.wait()
    try:
        until_gone(cloud, dog)
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_disarmed_it_leaves_the_box_alone(cloud: Cloud) -> None:
    process, dog = owner("disarm")
    assert process.wait(30) == 0
    assert process_start(dog) is None
    assert len(cloud.find("gf1-w-")) == 1


def test_its_command_line_tells_nothing(cloud: Cloud) -> None:
    process, dog = owner()
    try:
        argv = Path(f"/proc/{dog}/cmdline").read_text()
        assert "watched" not in argv
        assert "local" not in argv.replace("/usr/local", "")
    finally:
        process.kill()
        process.wait()
        until_gone(cloud, dog)
