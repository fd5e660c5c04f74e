from __future__ import annotations

import asyncio
import contextlib
import io
import os
import random
import signal
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from gpu_flows.errors import BadRequest
from gpu_flows.remote import jobs
from gpu_flows.remote.errors import RemoteScriptFailed
from gpu_flows.remote.jobs import JobState, job_status, kill_job, list_jobs, start_job
from gpu_flows.remote.ssh import RemoteBox
from tests.remote.shellbox import (
    SHELLS,
    ShellBox,
    cmdline,
    connections_of,
    end,
    in_every_shell,
    pids,
    process_state,
    until,
    with_variable,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def dash_box(tmp_path):
    box = ShellBox(tmp_path / "box", "dash")
    yield box
    box.close()


def folder_of(box, job_id: str) -> Path:
    return box.home / ".gpu-flows" / "jobs" / job_id


def state_file(box, job_id: str, name: str) -> Path:
    return folder_of(box, job_id) / ".state" / name


def log_of(box, job_id: str) -> bytes:
    return (folder_of(box, job_id) / "log").read_bytes()


def processes_of(box, job_id: str) -> list[int]:
    return with_variable(f"GPU_FLOWS_JOB_DIR={folder_of(box, job_id)}")


async def start(box, job_id: str, command: str, **more):
    return await start_job(box, job_id, command, timeout_s=20, **more)


async def status_of(box, job_id: str):
    return await job_status(box, job_id, timeout_s=20)


async def ended(box, job_id: str, timeout_s: float = 20):
    await until(lambda: state_file(box, job_id, "exit").exists(), timeout_s)
    return await status_of(box, job_id)


async def runner_of(box, job_id: str) -> int:
    return int(state_file(box, job_id, "runner").read_text().split()[0])


# How a job ends.


@pytest.mark.parametrize(
    ("command", "code", "why", "log"),
    [
        ("echo out; echo err >&2", 0, "exit", b"out\nerr\n"),
        ("exit 3", 3, "exit", b""),
        ("echo one\nexit 4\necho two", 4, "exit", b""),
        ("cat <<END\nhere\nEND\nexit 5", 5, "exit", b"here\n"),
        ("kill -KILL $$", 137, "signal", b""),
        ("sh -c 'kill -SEGV $$'; exit 0", 0, "exit", b""),
        ("no-such-command-at-all", 127, "exit", None),
        ("if then", 2, "exit", None),
    ],
    ids=["both streams", "exit", "lines", "heredoc", "killed", "child killed", "unknown", "syntax error"],
)
async def test_exit_code_and_log(dash_box, command, code, why, log):
    await start(dash_box, "j", command)
    status = await ended(dash_box, "j")
    assert (status.state, status.exit_code, status.why) == (JobState.EXITED, code, why)
    assert status.has_ended
    if log:
        assert log_of(dash_box, "j").endswith(log)
    assert status.log_bytes == len(log_of(dash_box, "j"))


@in_every_shell
async def test_life_of_a_job(box):
    assert (await status_of(box, "j")).state is JobState.ABSENT
    status = await start(box, "j", "pwd; cat go; exit 7", files={"a b/ü.txt": b"\x00\xff"})
    assert status.state in (JobState.RUNNING, JobState.EXITED)
    status = await ended(box, "j")
    assert (status.state, status.exit_code, status.why) == (JobState.EXITED, 7, "exit")
    assert log_of(box, "j").startswith(f"{box.home}\n".encode())
    assert (folder_of(box, "j") / "a b" / "ü.txt").read_bytes() == b"\x00\xff"
    for moment in (status.started_at, status.ended_at, status.heartbeat_at, status.box_time):
        assert abs(moment.timestamp() - time.time()) < 60
        assert moment.utcoffset().total_seconds() == 0
    assert status.free_kb > 0
    await start(box, "k", "sleep 600")
    assert [(s.job_id, s.state) for s in await list_jobs(box, timeout_s=20)] == [
        ("j", JobState.EXITED),
        ("k", JobState.RUNNING),
    ]


@in_every_shell
async def test_environment_arrives_byte_for_byte(box):
    every_byte = bytes(range(1, 256))
    env = {
        "EVERY": every_byte.decode("utf-8", "surrogateescape"),
        "QUOTES": "'\"`$(id)$HOME\\\n\n'\\''",
        "EMPTY": "",
        "folder": "lower case, as our own variables are",
        "LONG": "x" * 60_000,
    }
    secrets = {"TOKEN": "s e'c\nret\\n", "PATH_TO": "é"}
    await start(box, "j", "exec cat /proc/self/environ", env=env, secrets=secrets)
    assert (await ended(box, "j")).exit_code == 0
    seen = dict(pair.split(b"=", 1) for pair in log_of(box, "j").split(b"\0") if pair)
    for name, value in (env | secrets).items():
        assert seen[name.encode()] == value.encode("utf-8", "surrogateescape")
    assert seen[b"GPU_FLOWS_JOB_ID"] == b"j"
    assert seen[b"GPU_FLOWS_JOB_DIR"] == str(folder_of(box, "j")).encode()


async def test_the_job_has_the_logins_umask_and_default_signals(dash_box):
    await start(dash_box, "j", "umask; grep SigIgn /proc/self/status")
    await ended(dash_box, "j")
    umask, ignored = log_of(dash_box, "j").decode().splitlines()
    assert int(umask, 8) == os.umask(os.umask(0o22))
    if subprocess.run(["env", "--default-signal=INT", "true"], capture_output=True).returncode == 0:
        assert int(ignored.split()[1], 16) & 0b111 == 0


@pytest.mark.parametrize("job_id", ["", ".hidden", "a/b", "..", "a b", "x" * 101, "a\n"])
async def test_bad_ids_are_refused(dash_box, job_id):
    with pytest.raises(BadRequest, match="id of a job"):
        await start(dash_box, job_id, "true")


@pytest.mark.parametrize(
    "bad",
    [
        {"env": {"1A": "x"}},
        {"env": {"A=B": "x"}},
        {"env": {"UID": "0"}},
        {"env": {"GPU_FLOWS_JOB_ID": "x"}},
        {"secrets": {"A": "x\0y"}},
        {"files": {"/etc/passwd": b""}},
        {"files": {"../x": b""}},
        {"files": {"log": b""}},
        {"files": {".state/exit": b""}},
        {"files": {".": b""}},
    ],
    ids=str,
)
async def test_bad_names_are_refused_and_values_not_shown(dash_box, bad):
    with pytest.raises(BadRequest) as caught:
        await start(dash_box, "j", "true", **bad)
    assert "x\0y" not in str(caught.value)
    assert not folder_of(dash_box, "j").exists()


# Secrets.


async def test_c51_secrets_are_in_no_argument_and_no_file(dash_box):
    secret = "hf_inventedA1"
    ready = dash_box.home / "ready"
    command = f'touch {ready}; while [ -e {ready} ]; do sleep 0.05; done; printf %s "$HF_TOKEN" | wc -c'
    await start(dash_box, "j", command, secrets={"HF_TOKEN": secret}, env={"PUBLIC": "1"})
    await until(ready.exists)
    for pid in pids():
        with contextlib.suppress(OSError):
            assert secret.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    files = [path for path in dash_box.home.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if secret.encode() in path.read_bytes()]
    assert not [
        path for path in [*files, folder_of(dash_box, "j")] if path.stat().st_mode & 0o077 and path != ready
    ]
    ready.unlink()
    await ended(dash_box, "j")
    assert log_of(dash_box, "j").strip() == str(len(secret)).encode()


async def test_c51_secrets_of_a_job_that_never_starts_go_with_its_kill(dash_box):
    await stage(dash_box, "j", secrets={"TOKEN": "abc"})
    assert state_file(dash_box, "j", "secrets").stat().st_mode & 0o777 == 0o600
    assert await kill_job(dash_box, "j", grace_s=0, timeout_s=20) == 0
    assert not state_file(dash_box, "j", "secrets").exists()


# Exactly once.


async def stage(box, job_id: str, **more) -> None:
    """Leave a job staged, as a connection does that is lost before the runner started."""
    text = jobs.script("start")
    for ours, theirs in (('setsid sh "$folder', 'true "$folder'), ("$looks -lt 100", "$looks -lt 0")):
        assert ours in text
        text = text.replace(ours, theirs)
    payload = jobs._payload("echo ran >>ran", {}, more.get("secrets", {}), {})
    status = jobs.parse_status((await box.script(text, job_id, stdin=payload, timeout_s=20)).decode())
    assert status.state is JobState.STAGED


@in_every_shell
async def test_a_staged_job_is_started_by_asking_again(box):
    await stage(box, "j")
    await start(box, "j", "echo other >>ran")
    await ended(box, "j")
    assert (box.home / "ran").read_text() == "ran\n"


@in_every_shell
async def test_a_killed_staged_job_never_starts(box):
    await stage(box, "j")
    assert await kill_job(box, "j", grace_s=0, timeout_s=20) == 0
    status = await start(box, "j", "true")
    assert (status.state, status.why) == (JobState.EXITED, "cancelled")
    assert not (box.home / "ran").exists()


@in_every_shell
async def test_a_second_start_changes_nothing(box):
    for _ in range(3):
        await start(box, "j", "echo ran >>ran")
    await ended(box, "j")
    status = await start(box, "j", "echo ran >>ran")
    assert status.state is JobState.EXITED
    assert (box.home / "ran").read_text() == "ran\n"


@pytest.mark.parametrize("slowly", [False, True])
async def test_started_at_once_from_many_places_it_runs_once(dash_box, monkeypatch, slowly):
    if slowly:  # all of them have staged before the first one moves
        real = jobs.script
        slow = "  sleep 1\n  # Onto a folder"
        monkeypatch.setattr(jobs, "script", lambda name: real(name).replace("  # Onto a folder", slow))
    files = {"f": b"x" * 300_000}
    await asyncio.gather(*(start(dash_box, "j", "echo ran >>ran; sleep 0.5", files=files) for _ in range(8)))
    await ended(dash_box, "j")
    assert (dash_box.home / "ran").read_text() == "ran\n"
    assert not list(folder_of(dash_box, "j").parent.rglob(".stage.*"))


@in_every_shell
async def test_a_second_runner_finds_the_lock_taken(box):
    await start(box, "j", "echo ran >>ran; sleep 600")
    await until((box.home / "ran").exists)
    again = 'for n in 1 2 3; do sh "$1/.state/run.sh" "$1"; done'
    record = state_file(box, "j", "runner").read_text()
    await box.script(again, str(folder_of(box, "j")), timeout_s=20)
    assert state_file(box, "j", "runner").read_text() == record
    assert (box.home / "ran").read_text() == "ran\n"


async def test_airflow_30198_bootstraps_killed_at_random_moments_run_exactly_once(dash_box):
    text = jobs.script("start")
    for seed in range(20):
        chance = random.Random(seed)
        job_id = f"j{seed}"
        payload = jobs._payload("echo ran >>$GPU_FLOWS_JOB_DIR/ran", {}, {}, {"f": chance.randbytes(200_000)})
        for _ in range(chance.randint(1, 4)):
            process = await dash_box.open(text, job_id)
            process.stdin.write(payload[: chance.choice([len(payload), chance.randrange(len(payload))])])
            await asyncio.sleep(chance.uniform(0, 0.06))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()
        await start(dash_box, job_id, "echo ran >>$GPU_FLOWS_JOB_DIR/ran", files={"f": b""})
        assert (await ended(dash_box, job_id)).exit_code == 0
        assert (folder_of(dash_box, job_id) / "ran").read_text() == "ran\n"
    assert not list(folder_of(dash_box, "x").parent.glob(".stage.*"))


@in_every_shell
async def test_a_payload_cut_between_two_members_is_not_started(box):
    payload = jobs._payload("true", {}, {}, {"one": b"1", "two": b"2"})
    with tarfile.open(fileobj=io.BytesIO(payload)) as tar:
        boundaries = [entry.offset for entry in tar]
    for cut in [*boundaries[1:], boundaries[-1] - 100, 0]:
        with pytest.raises(RemoteScriptFailed, match="could not be unpacked"):
            await box.script(jobs.script("start"), "j", stdin=payload[:cut], timeout_s=20)
    assert list(folder_of(box, "j").parent.iterdir()) == []


@in_every_shell
async def test_stale_staging_folders_are_collected_and_live_ones_left(box):
    base = folder_of(box, "j").parent
    own = Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[19]
    live = base / f".stage.{os.getpid()}.{own}"
    reused = base / f".stage.{os.getpid()}.{int(own) + 1}"
    for folder in (live, reused, base / ".stage.", base / ".stage.1.x"):
        folder.mkdir(parents=True)
    await start(box, "j", "true")
    assert list(base.glob(".stage*")) == [live]


# Killing.


@in_every_shell
async def test_c39_a_cancel_ends_the_whole_chain(box):
    command = (
        'bash -c \'python3 -c "import subprocess; subprocess.run([\\"sleep\\", \\"600\\"])"; true\'; true'
    )
    await start(box, "j", command)
    await until(lambda: len(processes_of(box, "j")) == 4)
    assert await kill_job(box, "j", grace_s=5, timeout_s=30) == 0
    status = await status_of(box, "j")
    assert (status.state, status.why) == (JobState.EXITED, "cancelled")
    await until(lambda: box.processes() == [], 2)


ESCAPES = {
    "setsid": "setsid {nap} & {nap}",
    "double fork": "(setsid sh -c '{nap} & {nap}' &) ; {nap}",
    "cleared environment": "env -i $(command -v setsid) {stubborn} & {nap}",
    "leader dead": "(trap '' TERM; setsid {nap}) & kill -KILL $$",
    "ignores TERM": "{stubborn}",
}


@pytest.mark.parametrize("command", ESCAPES.values(), ids=ESCAPES)
@in_every_shell
async def test_pytorch_110065_nobody_escapes_a_kill(box, command):
    # Told by what they run: with its environment a process loses every marker.
    files = {
        "nap.sh": b"while :; do sleep 1; done",
        "stubborn.sh": b"trap '' TERM\nwhile :; do sleep 1; done",
    }
    run = f"{box.tools}/sh {folder_of(box, 'j')}"

    def left() -> list[int]:
        return [pid for pid in pids() if f"{folder_of(box, 'j')}/".encode() in cmdline(pid)]

    await start(box, "j", command.format(nap=f"{run}/nap.sh", stubborn=f"{run}/stubborn.sh"), files=files)
    await until(lambda: len(left()) > 1)  # more than the recorder
    await asyncio.sleep(0.2)
    assert await kill_job(box, "j", grace_s=1, timeout_s=30) == 0
    assert (await ended(box, "j")).state is JobState.EXITED
    await until(lambda: box.processes() == [] and left() == [], 2)


async def test_the_grace_is_for_the_last_process_not_for_the_shell_around_it(dash_box, monkeypatch):
    real = jobs.script
    monkeypatch.setattr(jobs, "script", lambda name: real(name).replace("grace=5", "grace=0"))
    # The shell dies of TERM at once, the rank saves for two seconds; the recorder must not cut that short.
    save = "import signal,sys,time;signal.signal(15,lambda *a:(time.sleep(2),open('saved','w').close(),sys.exit()));"
    save += "open('ready','w').close();time.sleep(600)"
    await start(dash_box, "j", f'{sys.executable} -c "{save}"; true')
    await until((dash_box.home / "ready").exists)
    begun = time.monotonic()
    assert await kill_job(dash_box, "j", grace_s=20, timeout_s=60) == 0
    assert (dash_box.home / "saved").exists()
    assert time.monotonic() - begun < 10
    assert (await status_of(dash_box, "j")).why == "cancelled"


@pytest.mark.parametrize("content", ["", "0 1", "1 1", "-1 1", "12 34", "01 5", "x y", "12 34 56"])
async def test_c39_a_malformed_pid_is_refused(dash_box, content):
    bystander = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        await start(dash_box, "j", "sleep 600")
        state_file(dash_box, "j", "pid").write_text(content)
        assert await kill_job(dash_box, "j", grace_s=2, timeout_s=30) == 0
        assert (await ended(dash_box, "j")).why == "cancelled"
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


async def test_a_reused_pid_is_not_killed(dash_box):
    bystander = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        await start(dash_box, "j", "sleep 600")
        state_file(dash_box, "j", "pid").write_text(f"{bystander.pid} 12345\n")
        assert await kill_job(dash_box, "j", grace_s=2, timeout_s=30) == 0
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@in_every_shell
async def test_a_zombie_counts_as_dead(box):
    child = subprocess.Popen(["true"])
    await until(lambda: process_state(child.pid) == "Z")
    started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
    text = (await box.script(jobs.script("status"), "x", timeout_s=5)) and jobs.script("status")
    check = text.replace(
        'if [ $# -gt 0 ]; then\n  describe "$1"',
        'if :; then\n  is_alive "$1" "$2" && echo alive || echo dead',
    )
    assert await box.script(check, str(child.pid), started, timeout_s=5) == b"dead\n"
    own = Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[19]
    assert await box.script(check, str(os.getpid()), own, timeout_s=5) == b"alive\n"
    child.wait()


async def test_two_boxes_of_one_machine_with_the_same_job_id_are_apart(tmp_path):
    one, two = ShellBox(tmp_path / "1", "dash"), ShellBox(tmp_path / "2", "dash")
    try:
        await start(one, "train", "sleep 600")
        await start(two, "train", "sleep 600")
        assert await kill_job(one, "train", grace_s=2, timeout_s=30) == 0
        assert (await status_of(two, "train")).state is JobState.RUNNING
        assert processes_of(two, "train")
    finally:
        one.close()
        two.close()


async def test_a_kill_that_comes_before_the_job_is_there_is_not_lost(dash_box, monkeypatch):
    real = jobs.script
    slow = "sleep 1\n\n# A second session"
    monkeypatch.setattr(jobs, "script", lambda name: real(name).replace("# A second session", slow))
    starting = asyncio.create_task(start(dash_box, "j", "touch ran; exec sleep 600"))
    await until(lambda: state_file(dash_box, "j", "runner").exists())
    assert await kill_job(dash_box, "j", grace_s=2, timeout_s=30) == 0
    await starting
    status = await ended(dash_box, "j")
    assert (status.exit_code, status.why) == (143, "cancelled")
    assert not (dash_box.home / "ran").exists()


async def test_a_folder_of_somebody_else_in_the_jobs_place_is_an_error(dash_box):
    (folder_of(dash_box, "j") / "ranks").mkdir(parents=True)
    with pytest.raises(RemoteScriptFailed, match="something else is there"):
        await start(dash_box, "j", "true")


async def test_killing_what_is_over_or_unknown_is_nothing(dash_box):
    assert await kill_job(dash_box, "nobody", grace_s=1, timeout_s=20) == 0
    assert (await status_of(dash_box, "nobody")).state is JobState.ABSENT
    await start(dash_box, "j", "exit 3")
    before = await ended(dash_box, "j")
    assert await kill_job(dash_box, "j", grace_s=1, timeout_s=20) == 0
    assert (await status_of(dash_box, "j")).exit_code == before.exit_code == 3
    assert (await status_of(dash_box, "j")).why == "exit"


# What a job leaves behind.


@in_every_shell
async def test_c37_a_background_child_does_not_delay_the_end(box):
    begun = time.monotonic()
    await start(box, "j", "sleep 600 & exit 7")
    status = await ended(box, "j")
    assert (status.exit_code, status.why) == (7, "exit")
    assert time.monotonic() - begun < 5
    await until(lambda: box.processes() == [], 2)


async def test_u11_daemons_end_with_the_job_and_their_port_is_free(dash_box):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = (
        f"{sys.executable} -m http.server --bind 127.0.0.1 {port} >/dev/null 2>&1 &\n"
        f"(setsid sh -c 'setsid sleep 600 & sleep 600' &)\n"
        f"until {sys.executable} -c 'import socket; socket.create_connection((\"127.0.0.1\", {port}))'\n"
        "do :; done 2>/dev/null\n"
        "exit 0"
    )
    await start(dash_box, "j", command)
    status = await ended(dash_box, "j")
    assert (status.exit_code, status.why) == (0, "exit")
    await until(lambda: dash_box.processes() == [], 2)
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", port))


# When things die.


@in_every_shell
async def test_a_killed_recorder_leaves_an_orphan_that_can_be_killed(box):
    await start(box, "j", "sleep 600")
    await end(await runner_of(box, "j"))
    status = await status_of(box, "j")
    assert (status.state, status.has_ended) == (JobState.ORPHANED, False)
    assert await kill_job(box, "j", grace_s=2, timeout_s=30) == 0
    status = await status_of(box, "j")
    assert (status.state, status.why) == (JobState.EXITED, "cancelled")


@in_every_shell
async def test_a_job_dead_with_its_recorder_is_lost(box):
    await start(box, "j", "sleep 600")
    await end(await runner_of(box, "j"))
    for pid in processes_of(box, "j"):
        os.kill(pid, signal.SIGKILL)
    await until(lambda: not processes_of(box, "j"))
    status = await status_of(box, "j")
    assert (status.state, status.why) == (JobState.LOST, "runner-and-job-died")
    assert await kill_job(box, "j", grace_s=2, timeout_s=30) == 0
    assert (await status_of(box, "j")).state is JobState.LOST
    assert (await start(box, "j", "true")).state is JobState.LOST  # never a second time


@pytest.mark.parametrize(
    ("change", "why"),
    [(lambda b, p: f"other {p}", "rebooted"), (lambda b, p: f"{b} 7", "container-restarted")],
)
async def test_a_reboot_and_a_restarted_container_are_told_apart(dash_box, change, why):
    await start(dash_box, "j", "sleep 600")
    file = state_file(dash_box, "j", "runner")
    pid, started, boot, first = file.read_text().split()
    os.kill(int(pid), signal.SIGKILL)
    file.write_text(f"{pid} {started} {change(boot, first)}\n")
    await until(lambda: not Path(f"/proc/{pid}/exe").exists())
    status = await status_of(dash_box, "j")
    assert (status.state, status.why) == (JobState.LOST, why)


async def test_a_runner_killed_before_it_wrote_its_name_is_given_ten_seconds(dash_box):
    await stage(dash_box, "j")
    blank = state_file(dash_box, "j", "runner.blank")
    blank.rename(state_file(dash_box, "j", "runner"))
    status = await status_of(dash_box, "j")
    assert (status.state, status.why) == (JobState.RUNNING, "starting")
    (dash_box.tools / "stat").write_text("#!/bin/sh\necho 0\n")  # a change time long ago
    (dash_box.tools / "stat").chmod(0o755)
    status = await status_of(dash_box, "j")
    assert (status.state, status.why) == (JobState.LOST, "runner-never-started")


@in_every_shell
async def test_a_term_to_the_recorder_changes_nothing(box):
    await start(box, "j", "sleep 1; exit 9")
    os.kill(await runner_of(box, "j"), signal.SIGTERM)
    status = await ended(box, "j")
    assert (status.exit_code, status.why) == (9, "exit")


async def test_the_recorder_shows_that_it_is_alive_and_its_heart_stops_with_it(dash_box, monkeypatch):
    real = jobs.script
    monkeypatch.setattr(jobs, "script", lambda name: real(name).replace("sleep 5 &", "sleep 0.2 &"))
    await start(dash_box, "j", "sleep 600")
    heartbeat = state_file(dash_box, "j", "heartbeat")
    for _ in range(2):
        os.utime(heartbeat, (0, 0))
        await until(lambda: heartbeat.stat().st_mtime > 0)
    await end(await runner_of(dash_box, "j"))
    await until(lambda: len(dash_box.processes()) == len(processes_of(dash_box, "j")))


async def test_pytorch_76287_the_wait_for_what_cannot_be_killed_is_bounded(dash_box, monkeypatch):
    real = jobs.script
    unkillable = "members() { echo 999999999; }\n\n# TERM to each"
    monkeypatch.setattr(jobs, "script", lambda name: real(name).replace("# TERM to each", unkillable))
    await start(dash_box, "j", "exec sleep 600")
    begun = time.monotonic()
    assert await kill_job(dash_box, "j", grace_s=0, timeout_s=4) == 1
    assert time.monotonic() - begun < 15
    assert (await status_of(dash_box, "j")).state is JobState.RUNNING


# A full disk, and no memory.


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


@pytest.mark.parametrize("shell", SHELLS)
async def test_a_full_disk_loses_no_exit_code_and_no_kill(small_disk, tmp_path, shell):
    box = ShellBox(tmp_path / "box", shell)
    box.home = small_disk
    box.env["HOME"] = str(small_disk)
    fill = "head -c 9000000 /dev/zero >filler 2>/dev/null; echo more >>more; "
    try:
        await start(box, "a", fill + "exit 28")
        status = await ended(box, "a")
        assert (status.exit_code, status.why, status.free_kb) == (28, "exit", 0)
        (small_disk / "filler").unlink()
        await start(box, "b", fill + "touch full; sleep 600")
        await until((small_disk / "full").exists)
        assert await kill_job(box, "b", grace_s=2, timeout_s=30) == 0
        status = await ended(box, "b")
        assert (status.state, status.why) == (JobState.EXITED, "cancelled")
        with pytest.raises(RemoteScriptFailed, match=r"could not be unpacked .* \(0 KiB free\)"):
            await start(box, "c", "true")
        assert (await status_of(box, "c")).state is JobState.ABSENT
    finally:
        box.close()


@pytest.mark.parametrize("shell", SHELLS)
async def test_out_of_memory_is_told_by_the_cgroup(tmp_path, shell):
    group = next(
        (Path(p) for p in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup") if Path(p, "cgroup.procs").exists()),
        None,
    )
    if group is None or os.geteuid() != 0:
        pytest.skip("no memory cgroup that we may use")
    group /= f"gpu-flows-test-{os.getpid()}"
    try:
        group.mkdir()
        limit = next(group / n for n in ("memory.limit_in_bytes", "memory.max") if (group / n).exists())
        limit.write_text(str(48 << 20))
    except (OSError, StopIteration):
        pytest.skip("making a memory cgroup is not permitted")
    box = ShellBox(tmp_path / "box", shell)
    box.prefix = ["sh", "-c", f'echo $$ >{group}/cgroup.procs; exec "$@"', "-"]
    try:
        # The rank is killed, what launched it says 1.
        await start(box, "j", "python3 -c 'x = b\"x\" * (200 << 20)' || exit 1")
        status = await ended(box, "j")
        assert (status.exit_code, status.why) == (1, "oom")
        await start(box, "k", "exit 1")
        assert (await ended(box, "k")).why == "exit"
    finally:
        box.close()
        for _ in range(100):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            await asyncio.sleep(0.05)


# Over SSH.


@pytest.mark.sshd
async def test_over_ssh_with_a_noisy_login_shell_in_job_control_mode(sshd):
    (sshd.home / ".bashrc").write_text("set -m\necho noise\necho more noise >&2\n")
    async with RemoteBox(sshd.endpoint, sshd.private_key) as box:
        status = await start(box, "j", 'printf %s "$TOKEN"; sleep 600', secrets={"TOKEN": "a'b"})
        assert status.state is JobState.RUNNING
        await until(lambda: log_of(sshd, "j") == b"a'b")
        # Nothing but the job itself hangs on the connection: it outlives it.
        for pid in connections_of(sshd):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert (await status_of(box, "j")).state is JobState.RUNNING
        assert await kill_job(box, "j", grace_s=5, timeout_s=30) == 0
        status = await status_of(box, "j")
        assert (status.state, status.why) == (JobState.EXITED, "cancelled")
        assert processes_of(sshd, "j") == []


@pytest.mark.sshd
async def test_over_ssh_lost_connections_while_it_starts(sshd):
    async def cut(times: int) -> None:
        for _ in range(times):
            await asyncio.sleep(0.15)
            for pid in connections_of(sshd):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    async with RemoteBox(sshd.endpoint, sshd.private_key) as box:
        cutting = asyncio.create_task(cut(5))
        for n in range(5):
            await start(box, f"j{n}", "echo ran >>$GPU_FLOWS_JOB_DIR/ran", files={"f": os.urandom(3_000_000)})
        await cutting
        for n in range(5):
            assert (await status_of(box, f"j{n}")).state in (
                JobState.EXITED,
                JobState.RUNNING,
            )
            await until(lambda n=n: (folder_of(sshd, f"j{n}") / "ran").exists())
            assert (folder_of(sshd, f"j{n}") / "ran").read_text() == "ran\n"


@pytest.mark.table
async def test_ranks_of_torchrun_end_though_torchrun_was_killed_hard(tmp_path):
    """Every rank is a session of its own and none is told of torchrun's death."""
    box = ShellBox(tmp_path / "box", "dash")
    box.env["PATH"] = f"{Path(sys.executable).parent}:{box.env['PATH']}"
    train = b"import os, time\nopen('rank' + os.environ['RANK'], 'w').close()\ntime.sleep(600)\n"
    try:
        command = 'torchrun --standalone --nproc-per-node 2 "$GPU_FLOWS_JOB_DIR/train.py"'
        status = await start(box, "j", command, files={"train.py": train})
        await until(lambda: (box.home / "rank0").exists() and (box.home / "rank1").exists(), 90)
        torchrun = [
            pid for pid in processes_of(box, "j") if b"torchrun" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.killpg(status.pid, signal.SIGKILL)
        for pid in torchrun:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        status = await ended(box, "j", 30)
        assert (status.exit_code, status.why) == (137, "signal")
        await until(lambda: box.processes() == [], 2)
    finally:
        box.close()
