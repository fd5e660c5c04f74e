from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpu_flows.leases import deadman
from gpu_flows.leases.deadman import (
    FOLDER,
    HALT,
    DeadmanError,
    Found,
    arm_heartbeat,
    boot_script,
    disarm_heartbeat,
    parse_fired,
    renew,
)
from gpu_flows.remote.jobs import JobState, job_status, start_job
from gpu_flows.remote.ssh import RemoteBox
from tests.remote.conftest import client_key, make_sshd, sshd  # noqa: F401 - fixtures
from tests.remote.shellbox import SHELLS, ShellBox, cmdline, end, in_every_shell, pids, process_state, until

pytestmark = pytest.mark.anyio

# Not the real thing, since the tests want to look at the box afterwards.
DESTROY = 'echo "$1" >>"$HOME/destroyed"'


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def dash_box(tmp_path):
    box = ShellBox(tmp_path / "box", "dash")
    yield box
    box.close()


def script(left_s: float, destroy: str = DESTROY, *, length_s: float | None = None, **more) -> str:
    return boot_script(
        datetime.now(UTC) + timedelta(seconds=left_s),
        destroy,
        **{"length_s": length_s or left_s, "tick_s": 0.2, "retry_s": 0.3} | more,
    )


async def boot(box, text: str) -> None:
    assert await box.script(text, timeout_s=10) == b""
    await until(lambda: words(box, "left"))


def words(box, name: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return (box.home / FOLDER / name).read_text().split()
    return []


def destroyed(box) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return (box.home / "destroyed").read_text().split()
    return []


def deadmen(box) -> list[int]:
    """Return every dead-man of this box that lives; what it forks looks like it for a moment."""
    found = []
    for pid in pids():
        with contextlib.suppress(OSError):
            argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if argv[-3:-1] == [b"deadman.sh", str(box.home / FOLDER).encode()]:
                found.append(pid)
    return found


def deadman_pid(box) -> int:
    return int(words(box, "pid")[0])


async def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: process_state(pid) == "T")


# The hard deadline.


@in_every_shell
async def test_it_fires_at_the_deadline_though_nobody_ever_connects(box):
    begun = time.time()
    await boot(box, script(3))
    await until(lambda: destroyed(box))
    assert time.time() - begun >= 1  # whole seconds on both sides
    fired = parse_fired((box.home / FOLDER / "fired").read_text())
    assert fired.why == "deadline"
    assert abs(fired.at.timestamp() - time.time()) < 10
    # It goes on until the box is gone, and its record stays the first.
    await until(lambda: len(destroyed(box)) >= 3)
    assert parse_fired((box.home / FOLDER / "fired").read_text()) == fired


@in_every_shell
async def test_it_fires_at_the_deadline_in_spite_of_renewals(box):
    await boot(box, script(2))
    await arm_heartbeat(box, silence_s=60, timeout_s=10)
    fired = None
    async with asyncio.timeout(20):
        while fired is None:
            fired = (await renew(box, timeout_s=10)).fired
            await asyncio.sleep(0.1)
    assert fired.why == "deadline"
    await until(lambda: destroyed(box))


async def test_it_ends_a_box_whose_deadline_passed_before_it_booted(dash_box):
    await boot(dash_box, script(-100, length_s=3600))
    await until(lambda: destroyed(dash_box))


async def test_c65_a_clock_that_is_behind_gives_no_more_than_the_leases_length(dash_box):
    set_clock(dash_box, -86_400)
    await boot(dash_box, script(3600))
    assert 3590 <= int(words(dash_box, "left")[2]) <= 3600


@in_every_shell
async def test_neither_setting_the_clock_back_nor_forth_defeats_it(box):
    set_clock(box, 0)
    await boot(box, script(300))
    _, at, left, *_ = words(box, "left")
    for offset_s in (-86_400, 86_400):
        set_clock(box, offset_s)
        before = words(box, "left")[1]
        await until(lambda before=before: words(box, "left")[1] != before)
        _, now, left_now, *_ = words(box, "left")
        assert int(now) + int(left_now) == int(at) + int(left)
    assert not words(box, "fired")


@pytest.mark.parametrize(("clock_s", "left"), [(-86_400, (90, 101)), (40, (40, 61)), (86_400, (-90_000, 0))])
async def test_after_a_reboot_the_wall_clock_may_only_shorten_what_is_left(dash_box, clock_s, left):
    set_clock(dash_box, 0)
    await boot(dash_box, script(100, tick_s=5))
    await end(deadman_pid(dash_box))
    file = dash_box.home / FOLDER / "left"
    _, _, *rest = file.read_text().split()
    file.write_text(" ".join(["another-boot", "999999999", *rest]) + "\n")
    set_clock(dash_box, clock_s)
    await dash_box.script(
        's=$(command -v setsid); $s sh "$1/deadman.sh" "$1" >/dev/null 2>&1 </dev/null &',
        str(dash_box.home / FOLDER),
        timeout_s=10,
    )
    await until(lambda: words(dash_box, "left")[0] != "another-boot")
    assert left[0] <= int(words(dash_box, "left")[2]) <= left[1]


@in_every_shell
async def test_the_deadline_goes_on_over_a_restart_and_a_second_boot_starts_nobody(box):
    text = script(100)
    await boot(box, text)
    first = words(box, "left")
    await box.script(text, timeout_s=10)
    await asyncio.sleep(0.3)
    await until(lambda: len(deadmen(box)) == 1)
    await end(deadman_pid(box))
    await asyncio.sleep(1.2)
    await box.script(text, timeout_s=10)
    await until(lambda: words(box, "left")[1] != first[1])
    boot_id, at, left, hard, *_ = words(box, "left")
    assert (boot_id, hard) == (first[0], first[3])
    assert int(at) + int(left) == int(first[1]) + int(first[2])


async def test_a_torn_memory_is_forgotten(dash_box):
    text = script(300)
    await boot(dash_box, text)
    await end(deadman_pid(dash_box))
    (dash_box.home / FOLDER / "left").write_text("boot 12 3x0 junk 5 -")
    await dash_box.script(text, timeout_s=10)
    await until(lambda: len(words(dash_box, "left")) == 6 and words(dash_box, "left")[2].isdigit())
    assert 290 <= int(words(dash_box, "left")[2]) <= 300
    assert deadmen(dash_box)


async def test_a_home_that_outlived_its_box_says_nothing_about_the_next_lease(dash_box):
    await boot(dash_box, script(1))
    await until(lambda: destroyed(dash_box))
    await end(deadman_pid(dash_box))
    await boot(dash_box, script(500))
    assert int(words(dash_box, "left")[2]) > 400
    assert (await renew(dash_box, timeout_s=10)).fired is None


def set_clock(box, offset_s: int) -> None:
    """Let the box's clock be off by so much."""
    date = box.tools / "date"
    new = box.tools / "date.new"
    new.write_text(f"#!/bin/sh\necho $(($(/bin/date +%s) + {offset_s}))\n")
    new.chmod(0o755)
    new.replace(date)


# The heartbeat.


@in_every_shell
async def test_silence_ends_the_box_and_renewals_keep_it(box):
    await boot(box, script(300))
    await asyncio.sleep(0.5)
    state = await arm_heartbeat(box, silence_s=2, timeout_s=10)
    assert (state.found, state.rearmed, state.silence_s, state.fired) == (Found.RUNNING, False, 2, None)
    assert 290 <= state.left_s <= 300
    for _ in range(5):
        await asyncio.sleep(0.5)
        assert (await renew(box, timeout_s=10)).fired is None
    assert not destroyed(box)
    await until(lambda: destroyed(box))
    state = await renew(box, timeout_s=10)
    assert state.fired.why == "silence"
    # Nothing takes that back.
    before = len(destroyed(box))
    await until(lambda: len(destroyed(box)) >= before + 2)


async def test_only_a_change_of_content_is_a_renewal(dash_box):
    await boot(dash_box, script(300))
    await arm_heartbeat(dash_box, silence_s=1, timeout_s=10)
    lease = Path(f"/proc/{deadman_pid(dash_box)}/fd/3")
    async with asyncio.timeout(20):
        while not destroyed(dash_box):
            lease.write_bytes(lease.read_bytes())  # a new time stamp
            await asyncio.sleep(0.1)


async def test_detached_only_the_deadline_remains(dash_box):
    await boot(dash_box, script(4))
    await arm_heartbeat(dash_box, silence_s=1, timeout_s=10)
    state = await disarm_heartbeat(dash_box, timeout_s=10)
    assert state.silence_s is None
    await until(lambda: words(dash_box, "fired"))
    assert words(dash_box, "fired")[0] == "deadline"


async def test_one_odd_reading_ends_nothing(dash_box):
    await boot(dash_box, script(300, tick_s=1))
    await arm_heartbeat(dash_box, silence_s=1, timeout_s=10)
    await until(lambda: int(words(dash_box, "left")[4]) >= 1)  # the first strike
    await renew(dash_box, timeout_s=10)
    at = words(dash_box, "left")[1]
    await until(lambda: words(dash_box, "left")[1] != at)
    assert not words(dash_box, "fired")


async def test_two_boxes_of_one_machine_do_not_renew_each_other(tmp_path):
    one, two = ShellBox(tmp_path / "1", "dash"), ShellBox(tmp_path / "2", "dash")
    try:
        for box in (one, two):
            await boot(box, script(300))
            await arm_heartbeat(box, silence_s=1, timeout_s=10)
        async with asyncio.timeout(20):
            while not destroyed(one):
                await renew(two, timeout_s=10)
                await asyncio.sleep(0.1)
        assert not destroyed(two)
    finally:
        one.close()
        two.close()


async def test_nothing_is_left_in_shared_memory(dash_box):
    before = set(os.listdir("/dev/shm"))
    await boot(dash_box, script(300))
    await arm_heartbeat(dash_box, silence_s=60, timeout_s=10)
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("gpu-flows")}


async def test_without_writable_shared_memory_the_lease_is_on_the_disk(dash_box):
    hide = 'mount -t tmpfs -o ro tmpfs /dev/shm && exec "$@"'
    dash_box.prefix = ["unshare", "-m", "sh", "-c", hide, "-"]
    if subprocess.run([*dash_box.prefix, "true"], capture_output=True).returncode != 0:
        pytest.skip("mounting is not permitted")
    await boot(dash_box, script(300))
    await arm_heartbeat(dash_box, silence_s=2, timeout_s=10)
    assert words(dash_box, "lease")
    for _ in range(5):
        await asyncio.sleep(0.5)
        await renew(dash_box, timeout_s=10)
    assert not destroyed(dash_box)
    await until(lambda: destroyed(dash_box))


async def test_a_box_without_one_says_so(dash_box):
    state = await renew(dash_box, timeout_s=10)
    assert (state.found, state.rearmed, state.left_s) == (Found.MISSING, False, None)


# What happens to it.


@in_every_shell
async def test_it_ignores_term_and_is_started_again_when_killed(box):
    await boot(box, script(300))
    first = deadman_pid(box)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        os.kill(first, number)
    await asyncio.sleep(0.3)
    assert (await renew(box, timeout_s=10)).found is Found.RUNNING
    await end(first)
    state = await arm_heartbeat(box, silence_s=1, timeout_s=10)
    assert (state.found, state.rearmed) == (Found.DEAD, True)
    await until(lambda: deadmen(box) == [deadman_pid(box)] != [first])
    await until(lambda: destroyed(box))


@in_every_shell
async def test_a_stopped_one_is_replaced(box):
    await boot(box, script(300))
    first = deadman_pid(box)
    await stop(first)
    state = await renew(box, timeout_s=10)
    assert state.found is Found.STOPPED
    await until(lambda: deadmen(box) == [deadman_pid(box)] != [first])


async def test_a_stopped_one_that_goes_on_leaves_the_place_to_its_successor(dash_box):
    text = script(300)
    await boot(dash_box, text)
    first = deadman_pid(dash_box)
    await stop(first)
    await dash_box.script(text, timeout_s=10)
    await until(lambda: deadman_pid(dash_box) != first)
    os.kill(first, signal.SIGCONT)
    await until(lambda: deadmen(dash_box) == [deadman_pid(dash_box)])


async def test_one_that_no_longer_counts_is_replaced(dash_box):
    await boot(dash_box, script(300))
    first = deadman_pid(dash_box)
    file = dash_box.home / FOLDER / "left"
    words_before = file.read_text().split()
    await stop(first)
    (dash_box.tools / "sleep").write_text("#!/bin/sh\nexec /bin/sleep 600\n")
    (dash_box.tools / "sleep").chmod(0o755)
    os.kill(first, signal.SIGCONT)
    await asyncio.sleep(0.5)
    words_before[1] = str(int(words_before[1]) - 60)
    file.write_text(" ".join(words_before).ljust(127) + "\n")
    (dash_box.tools / "sleep").unlink()
    state = await renew(dash_box, timeout_s=10)
    assert state.found is Found.HUNG
    await until(lambda: deadmen(dash_box) == [deadman_pid(dash_box)] != [first])


async def test_c63_the_record_says_when_it_fired(dash_box):
    await boot(dash_box, script(1))
    await until(lambda: len(destroyed(dash_box)) >= 2)
    fired = parse_fired((dash_box.home / FOLDER / "fired").read_text())
    # Stable on every later look, however long the box is found again after its end.
    await asyncio.sleep(1.1)
    assert (await renew(dash_box, timeout_s=10)).fired == fired
    assert parse_fired("") is None
    assert parse_fired(" " * 127 + "\n") is None


async def test_one_that_cannot_be_started_is_an_error(dash_box, monkeypatch):
    real = deadman._script
    monkeypatch.setattr(deadman, "_script", lambda name: real(name).replace("$looks -lt 50", "$looks -lt 5"))
    await boot(dash_box, script(300))
    (dash_box.home / FOLDER / "deadman.sh").write_text("exit 1\n")
    await end(deadman_pid(dash_box))
    with pytest.raises(DeadmanError, match="is dead after it was started again"):
        await renew(dash_box, timeout_s=10)


@in_every_shell
async def test_removing_its_folder_does_not_save_the_box(box):
    await boot(box, script(3, 'touch "$HOME/destroyed"'))
    # What it needs to end the box goes with its folder; the jobs are killed and the last resort is lost too.
    await start_job(box, "j", "sleep 600", timeout_s=10)
    shutil.rmtree(box.home / FOLDER)
    await until(lambda: not [pid for pid in box.processes() if b"sleep\x00600" in cmdline(pid)])


# When the cloud does not listen.


@in_every_shell
async def test_with_the_api_down_it_retries_kills_the_jobs_and_halts(box, tmp_path):
    neighbour = ShellBox(tmp_path / "neighbour", "dash")
    try:
        await start_job(neighbour, "j", "sleep 600", timeout_s=10)
        await start_job(
            box, "j", "trap '' TERM; (setsid sleep 600 &); while :; do sleep 1; done", timeout_s=10
        )
        await boot(box, script(1, DESTROY + "; exit 1", last_resort='echo halted >>"$HOME/halted"'))
        await until(lambda: (box.home / "halted").exists())
        assert len(destroyed(box)) >= 3
        status = await job_status(box, "j", timeout_s=10)
        assert (status.state, status.exit_code) == (JobState.EXITED, 137)
        assert [pid for pid in box.processes() if b"sleep\x00600" in cmdline(pid)] == []
        assert (await job_status(neighbour, "j", timeout_s=10)).state is JobState.RUNNING
    finally:
        neighbour.close()


async def test_an_attempt_that_hangs_is_cut_off(dash_box):
    await boot(dash_box, script(1, DESTROY + "; exec sleep 600", attempt_s=1))
    await until(lambda: len(destroyed(dash_box)) >= 2)
    assert len([pid for pid in dash_box.processes() if b"sleep\x00600" in cmdline(pid)]) <= 1


async def test_it_goes_on_firing_after_a_restart(dash_box):
    text = script(1)
    await boot(dash_box, text)
    await until(lambda: destroyed(dash_box))
    await end(deadman_pid(dash_box))
    before, record = len(destroyed(dash_box)), words(dash_box, "fired")
    await dash_box.script(text, timeout_s=10)
    await until(lambda: len(destroyed(dash_box)) > before)
    assert words(dash_box, "fired") == record


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True
    ).returncode:
        pytest.skip("mounting a file system is not permitted")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


async def test_a_full_disk_stops_neither_renewals_nor_the_end(small_disk, tmp_path):
    boxes = [ShellBox(tmp_path / shell, shell, small_disk / shell) for shell in SHELLS if shutil.which(shell)]

    async def scenario(box) -> None:
        await arm_heartbeat(box, silence_s=2, timeout_s=10)
        for _ in range(5):
            await asyncio.sleep(0.5)
            assert (await renew(box, timeout_s=10)).fired is None
        await end(deadman_pid(box))
        assert (await renew(box, timeout_s=10)).found is Found.DEAD
        assert not (tmp_path / box.shell / "destroyed").exists()
        await until((tmp_path / box.shell / "destroyed").exists)
        assert words(box, "fired")[0] == "silence"

    try:
        for box in boxes:
            await boot(box, script(300, f"echo fired >>{tmp_path}/{box.shell}/destroyed"))
        with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        await asyncio.gather(*map(scenario, boxes))
    finally:
        for box in boxes:
            box.close()


# The script itself.


def test_it_fits_into_every_create_call():
    vast = (
        "export $(tr '\\0' '\\n' </proc/1/environ | grep -E '^CONTAINER_(ID|API_KEY)=')\n"
        'curl -fsS -m 50 -X DELETE "https://console.vast.ai/api/v0/instances/$CONTAINER_ID/" '
        '-H "Authorization: Bearer $CONTAINER_API_KEY"'
    )
    text = boot_script(datetime(2100, 1, 1, tzinfo=UTC), vast, length_s=9_999_999, last_resort=HALT)
    assert len(text.encode()) <= 3500 < 4096  # with room for what the cloud's adapter adds
    assert not re.search(r"^\s*#", text, re.MULTILINE)
    with pytest.raises(ValueError, match="time zone"):
        boot_script(datetime(2100, 1, 1), vast, length_s=1)


@in_every_shell
async def test_the_shell_around_the_boot_script_is_left_alone(box):
    destroy = "echo 'a'\"b\" \\n $HOME `id` $(id)\nGPU_FLOWS_END\n# not a comment\n  indented"
    text = (
        "cd /; umask 022\n" + script(300, destroy) + 'echo "$PWD $(umask) ${d-unset} ${s-unset} ${c-unset}"\n'
    )
    assert await box.script(text, timeout_s=10) == b"/ 0022 unset unset unset\n"
    assert (box.home / FOLDER / "destroy").read_text() == destroy + "\n"
    for path in (box.home / FOLDER).iterdir():
        assert path.stat().st_mode & 0o077 == 0


@pytest.mark.sshd
async def test_over_ssh(sshd):  # noqa: F811
    (sshd.home / ".bashrc").write_text("set -m\necho noise\n")
    async with RemoteBox(sshd.endpoint, sshd.private_key) as box:
        await box.script(script(300), timeout_s=10)
        await until(lambda: words(sshd, "left"))
        assert (await arm_heartbeat(box, silence_s=2, timeout_s=10)).found is Found.RUNNING
        await end(deadman_pid(sshd))
        assert (await renew(box, timeout_s=10)).found is Found.DEAD
        await box.close()
        await until(lambda: destroyed(sshd))
