"""Whatever is killed whenever: what exists is found, and what is ended leaves nothing."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpu_flows.clouds.base import Box, BoxState
from gpu_flows.clouds.errors import CloudError, UnexpectedAnswer
from gpu_flows.clouds.local import LocalCloud
from tests.clouds.contract import box_name, until
from tests.clouds.local_boxes import (
    CPU,
    awkward_cloud,
    folder_of,
    marked_under,
    processes_of,
    rent,
    running,
    server_of,
    spec,
)
from tests.clouds.ssh_client import PUBLIC_KEY, run


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[LocalCloud]:
    yield from awkward_cloud(tmp_path)


# Killed makers


MAKER = """
import json, sys
from gpu_flows.clouds.local import LocalCloud
from gpu_flows.clouds.base import *
cloud = LocalCloud(root=sys.argv[1])
offer = Offer.from_json(json.loads(sys.argv[2]))
wanted = BoxSpec(name=sys.argv[3], nonce="0", owner="", ssh_public_key=sys.argv[4], deadline=datetime.now())
print("now", flush=True)
cloud.create(offer, wanted)
print("made", flush=True)
sys.stdin.read()
"""


def test_a_killed_maker_leaves_a_box_that_can_be_found_or_none_at_all(cloud: LocalCloud) -> None:
    chance = random.Random(15)
    made = 0
    offer = json.dumps(cloud.offers(CPU)[0].to_json())
    for _ in range(15):
        maker = subprocess.Popen(
            [sys.executable, "-c", MAKER, str(cloud.root), offer, box_name(), PUBLIC_KEY],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert maker.stdout is not None
        assert maker.stdin is not None
        assert maker.stdout.readline() == b"now\n"
        time.sleep(chance.uniform(0, 0.25))
        os.killpg(maker.pid, signal.SIGKILL)
        maker.wait()
        made += maker.stdout.read() == b"made\n"
        maker.stdout.close()
        maker.stdin.close()
    # What was under way when its maker died may still be born, within the lag that the cloud declares.
    time.sleep(cloud.capabilities.lag_s)
    boxes = cloud.find("gf1-test-")
    assert len(boxes) >= made
    ids = {box.id for box in boxes}
    for pid in marked_under(cloud.root):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert any(f"GPU_FLOWS_BOX_ID={box_id}".encode() in environment for box_id in ids), "a lost process"
    for box in boxes:
        running(cloud, box)
        cloud.destroy(box)
        assert cloud.describe(box).state is BoxState.GONE
    assert cloud.find("") == []
    assert marked_under(cloud.root) == {}


ENDER = (
    "import sys; from gpu_flows.clouds.local.registry import *; Registry(Path(sys.argv[1])).end(sys.argv[2])"
)


def test_a_killed_ender_can_be_repeated(cloud: LocalCloud) -> None:
    chance = random.Random(10)
    for _ in range(8):
        box = running(cloud, rent(cloud, boot_script="while :; do sleep 0.05; done"))
        (folder_of(cloud, box).home / "data").write_bytes(bytes(1000))
        ender = subprocess.Popen([sys.executable, "-c", ENDER, str(cloud.root), box.id])
        until(
            lambda box=box, ender=ender: folder_of(cloud, box).ending.exists() or ender.poll() == 0,
            "it has begun",
        )
        time.sleep(chance.uniform(0, 0.06))
        ender.kill()
        ender.wait()
        now = cloud.describe(box).state
        assert now in (BoxState.ENDING, BoxState.GONE)
        assert [b.id for b in cloud.find("")] == ([box.id] if now is BoxState.ENDING else [])
        cloud.destroy(box)
        gone = cloud.describe(box)
        assert gone.state is BoxState.GONE
        assert gone.ended_at is not None
        assert processes_of(box) == {}
    rent(cloud)
    assert list((cloud.root / "trash").iterdir()) == [], (
        "what killed enders left is removed by the next create"
    )


def test_a_box_can_be_ended_while_it_is_being_born(cloud: LocalCloud) -> None:
    for _ in range(5):
        box_of: list[Box | CloudError] = []

        def make(box_of: list[Box | CloudError] = box_of) -> None:
            try:
                box_of.append(rent(cloud))
            except CloudError as error:
                box_of.append(error)

        maker = threading.Thread(target=make)
        maker.start()
        until(lambda: cloud.find("") != [], "the box exists")
        for box in cloud.find(""):
            cloud.destroy(box)
        maker.join()
        assert cloud.find("") == []
        assert marked_under(cloud.root) == {}
        if isinstance(box_of[0], Box):
            assert cloud.describe(box_of[0]).state is BoxState.GONE


# Processes that do not want to go


STUBBORN = """
trap '' TERM INT HUP
setsid sh -c 'trap "" TERM; while :; do sleep 1; done' &
(setsid sh -c '(sleep 600 &) ; sleep 600' &)
env -i sleep 600 &
(setsid env -i sleep 600 &)
nohup sleep 600 >/dev/null 2>&1 &
sh -c 'kill -STOP $$' &
while :; do (sleep 600 &) ; sleep 0.05; done
"""


def test_every_process_of_a_box_ends_with_it(cloud: LocalCloud) -> None:
    box = running(cloud, rent(cloud, boot_script=STUBBORN))
    server = server_of(cloud, box)
    until(lambda: len(_below(server)) > 15, "there are many of them")
    others = rent(cloud, boot_script="sleep 600")
    below = _below(server)
    cloud.destroy(box)
    assert [pid for pid in below if _is_alive(pid)] == []
    assert processes_of(box) == {}
    assert "sleep 600" in " ".join(processes_of(others).values()), "the other box is untouched"


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _below(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(child) for child in children] + [p for child in children for p in _below(int(child))]


def test_the_processes_of_a_box_whose_server_was_killed_end_too(cloud: LocalCloud) -> None:
    box = running(cloud, rent(cloud, boot_script="setsid sleep 600 & sleep 600"))
    until(lambda: len(processes_of(box)) >= 4, "its processes run")
    os.kill(server_of(cloud, box), signal.SIGKILL)
    until(lambda: cloud.describe(box).state is BoxState.FAILED, "its death shows")
    assert "has ended" in cloud.describe(box).state_reason
    assert [b.id for b in cloud.find("")] == [box.id], "it bills until it is destroyed"
    cloud.destroy(box)
    assert processes_of(box) == {}


def test_a_server_s_number_in_other_hands_is_no_server(cloud: LocalCloud) -> None:
    box = running(cloud, rent(cloud))
    folder = folder_of(cloud, box)
    identity = json.loads(folder.server.read_bytes())
    os.kill(identity["pid"], signal.SIGKILL)
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        folder.server.write_text(json.dumps({**identity, "pid": bystander.pid}))
        assert cloud.describe(box).state is BoxState.FAILED
        cloud.destroy(box)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize("pid", [0, 1, -1])
def test_c39_a_number_that_would_signal_everybody_is_refused(cloud: LocalCloud, pid: int) -> None:
    box = running(cloud, rent(cloud))
    folder = folder_of(cloud, box)
    identity = json.loads(folder.server.read_bytes())
    folder.server.write_text(json.dumps({**identity, "pid": pid}))
    with pytest.raises(UnexpectedAnswer):
        cloud.describe(box)
    cloud.destroy(box)
    assert cloud.describe(box).state is BoxState.GONE
    assert processes_of(box) == {}


# A box that ends itself


@pytest.mark.parametrize(
    "how", ["{}", "set -m; {}", "trap '' TERM; {}; sleep 600", "{} & wait", "exec 3>&1; {}"]
)
def test_a_box_ends_itself_from_its_boot_script(cloud: LocalCloud, how: str) -> None:
    text = cloud.self_destruct(spec())
    assert text is not None
    box = rent(cloud, boot_script=how.format(text) + "\n")
    until(lambda: cloud.describe(box).state is BoxState.GONE, "it has ended itself")
    assert cloud.describe(box).ended_at is not None
    until(lambda: processes_of(box) == {}, "with all its processes")
    assert not (cloud.root / "boxes" / box.id).exists()


def test_a_box_and_an_outsider_may_end_it_at_once(cloud: LocalCloud) -> None:
    text = cloud.self_destruct(spec())
    assert text is not None
    for _ in range(3):
        box = running(cloud, rent(cloud))
        assert box.endpoint is not None
        run(box.endpoint, f"setsid sh -c {shlex.quote(text)} >/dev/null 2>&1 </dev/null &")
        cloud.destroy(box)
        assert cloud.describe(box).state is BoxState.GONE
        assert cloud.find("") == []


def test_a_self_destruct_that_fails_says_so(cloud: LocalCloud, tmp_path: Path) -> None:
    text = cloud.self_destruct(spec())
    assert text is not None
    outside = subprocess.run(
        ["/bin/sh", "-c", text], env={"GPU_FLOWS_BOX_ID": "nonsense"}, capture_output=True, check=False
    )  # fmt: skip
    assert outside.returncode != 0
    assert b"no id of a box" in outside.stderr
    without = subprocess.run(["/bin/sh", "-c", text], env={}, capture_output=True, check=False)
    assert without.returncode != 0


def test_a_box_past_its_deadline_whose_dead_man_was_killed_is_still_found(cloud: LocalCloud) -> None:
    box = running(cloud, rent(cloud, hours=-1))
    assert [b.id for b in cloud.find("gf1-test-")] == [box.id]
    assert datetime.fromisoformat(box.details["deadline"]) < datetime.now(UTC)


# What a box inherits


def test_c51_a_box_inherits_no_secret_and_no_shielding(
    cloud: LocalCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", "invented-secret-1")
    with open("/dev/null") as inherited:
        os.set_inheritable(inherited.fileno(), True)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            box = running(cloud, rent(cloud))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            signal.signal(signal.SIGHUP, before)
    assert box.endpoint is not None
    server = server_of(cloud, box)
    environment = Path(f"/proc/{server}/environ").read_bytes()
    assert b"invented-secret" not in environment
    assert b"invented-secret" not in run(box.endpoint, "env").stdout
    assert os.getsid(server) == server or os.getsid(server) != os.getsid(0)
    status = run(box.endpoint, "exec cat /proc/self/status").stdout.decode().splitlines()
    masks = dict(line.split(":\t") for line in status if line.startswith(("SigBlk", "SigIgn")))
    # Signals 32 and 33 belong to the C library: nobody else can reset them, whoever ignored them before us.
    theirs = 0b11 << 31
    assert {name: int(mask, 16) & ~theirs for name, mask in masks.items()} == {"SigBlk": 0, "SigIgn": 0}
    assert len(os.listdir(f"/proc/{server}/fd")) < 12
    assert run(box.endpoint, "ls /proc/self/fd").stdout.split() == [b"0", b"1", b"2", b"3"]


def test_the_boot_script_runs_in_the_box_s_own_environment(cloud: LocalCloud) -> None:
    box = cloud.create(
        cloud.offers(CPU)[0],
        spec(boot_script='env > "$HOME/env"; pwd > "$HOME/pwd"; echo done > "$HOME/done"'),
    )
    folder = folder_of(cloud, box)
    until((folder.home / "done").exists, "the boot script ran")
    environment = (folder.home / "env").read_text()
    assert f"GPU_FLOWS_BOX_ID={box.id}\n" in environment
    assert (folder.home / "pwd").read_text().strip() == str(folder.home)
    assert oct(folder.home.stat().st_mode & 0o777) == oct(0o700)
    assert oct(cloud.root.stat().st_mode & 0o777) == oct(0o700)


def test_an_end_that_was_given_up_half_way_is_finished_by_whoever_looks_next(cloud: LocalCloud) -> None:
    """The ender was killed after it had killed the box's processes, its dead-man among them."""
    box = running(cloud, rent(cloud))
    folder = folder_of(cloud, box)
    os.kill(server_of(cloud, box), signal.SIGKILL)
    folder.ending.touch()
    assert [found.state for found in cloud.find("gf1-")] == [BoxState.ENDING], "another one may be at it"
    a_while_ago = folder.ending.stat().st_mtime - 60
    os.utime(folder.ending, (a_while_ago, a_while_ago))
    assert cloud.find("gf1-") == []
    assert cloud.describe(box).state is BoxState.GONE
    assert cloud.describe(box).ended_at is not None
    assert processes_of(box) == {}
