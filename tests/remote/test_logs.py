from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import shlex
import signal
import time
from pathlib import Path

import pytest

from gpu_flows.errors import BadRequest, DeadlineExceeded
from gpu_flows.remote.errors import SshDropped
from gpu_flows.remote.jobs import JobState, kill_job, start_job
from gpu_flows.remote.logs import RawLog, follow, follow_all, log_sha256
from gpu_flows.remote.masking import Masker
from gpu_flows.remote.ssh import RemoteBox
from tests.remote.shellbox import ShellBox, connections_of, in_every_shell, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def dash_box(tmp_path):
    box = ShellBox(tmp_path / "box", "dash")
    yield box
    box.close()


async def start(box, command: str, **more):
    return await start_job(box, "j", command, timeout_s=20, **more)


async def follow_j(box, sink, **more):
    return await follow(box, "j", sink, **{"deadline_s": 40, "pace_s": 0.05} | more)


def log_file(home: Path, log: str = "log") -> Path:
    return home / ".gpu-flows" / "jobs" / "j" / log


@in_every_shell
async def test_c33_the_last_words_are_in_the_log(box):
    await start(
        box, "seq 1 100; echo 'Traceback (most recent call last):' >&2; echo 'ValueError: no' >&2; exit 3"
    )
    got = bytearray()
    status = await follow_j(box, got.extend)
    assert (status.state, status.exit_code) == (JobState.EXITED, 3)
    assert got.endswith(b"100\nTraceback (most recent call last):\nValueError: no\n")
    assert status.log_bytes == len(got)


@in_every_shell
async def test_c33_a_kill_with_a_child_that_lives_on_drains_too(box):
    await start(
        box, "nohup sleep 600 & trap 'echo last words; exit 1' TERM; echo up; while :; do sleep 0.1; done"
    )
    got = bytearray()
    following = asyncio.create_task(follow_j(box, got.extend))
    await until(lambda: b"up\n" in got)
    assert await kill_job(box, "j", grace_s=5, timeout_s=30) == 0
    status = await following
    assert (status.state, status.why) == (JobState.EXITED, "cancelled")
    assert got.endswith(b"last words\n")
    await until(lambda: box.processes() == [], 2)


@in_every_shell
async def test_any_bytes_from_any_offset(box):
    data = random.Random(1).randbytes(300_000) + b"\nend\nbeat\ndata 0 5\n"
    source = box.home / "source"
    source.write_bytes(data)
    await start(box, f"cat {source}")
    for offset in (0, 1, 299_999, len(data), len(data) + 10):
        got = bytearray()
        await follow_j(box, got.extend, offset=offset)
        assert got == data[offset:]


@in_every_shell
async def test_rank_logs_that_do_not_exist_yet_or_never_share_one_channel(box):
    rank = "for n in 1 2 3; do echo rank {r} line $n >>$GPU_FLOWS_JOB_DIR/ranks/{r}.log; sleep 0.1; done;"
    ranks = " ".join(rank.replace("{r}", r) for r in "01")
    await start(box, f"sleep 0.3; mkdir $GPU_FLOWS_JOB_DIR/ranks; {ranks} echo done")
    got = {name: bytearray() for name in ("log", "ranks/0.log", "ranks/1.log", "ranks/2.log")}
    opened = []
    stream = box.stream
    box.stream = lambda *args, **more: opened.append(args) or stream(*args, **more)
    await follow_all(
        box, "j", {name: buffer.extend for name, buffer in got.items()}, deadline_s=30, pace_s=0.05
    )
    assert len(opened) == 1
    assert got["log"] == b"done\n"
    assert got["ranks/0.log"] == b"rank 0 line 1\nrank 0 line 2\nrank 0 line 3\n"
    assert got["ranks/1.log"] == b"rank 1 line 1\nrank 1 line 2\nrank 1 line 3\n"
    assert got["ranks/2.log"] == b""


@pytest.mark.parametrize("log", ["", "../x", "/etc/passwd", "a/../../b", "."])
async def test_logs_outside_the_folder_are_refused(dash_box, log):
    with pytest.raises(BadRequest, match="no path inside"):
        await follow_j(dash_box, print, log=log)


async def test_a_job_that_is_unknown_ends_at_once(dash_box):
    assert (await follow_j(dash_box, print)).state is JobState.ABSENT


async def test_the_deadline_is_kept(dash_box):
    await start(dash_box, "echo up; sleep 600")
    got = bytearray()
    begun = time.monotonic()
    dash_box.stream = _with_remote_timeout(dash_box.stream)
    with pytest.raises(DeadlineExceeded, match=r"had not ended after 0\.5 s"):
        await follow_j(dash_box, got.extend, deadline_s=0.5)
    assert time.monotonic() - begun < 5
    assert got == b"up\n"


def _with_remote_timeout(stream):
    from gpu_flows.remote.errors import RemoteTimeout

    async def streaming(*args, timeout_s):
        try:
            async for chunk in stream(*args, timeout_s=timeout_s):
                yield chunk
        except TimeoutError as exc:
            raise RemoteTimeout("too late") from exc

    return streaming


async def test_what_a_sink_raises_comes_out_and_ends_the_follower_on_the_box(dash_box):
    await start(dash_box, "echo up; sleep 600")

    def sink(_data):
        raise OSError(28, "disk full here")

    with pytest.raises(OSError, match="disk full here"):
        await follow_j(dash_box, sink)
    await until(lambda: not _followers())


def _followers() -> list[str]:
    found = []
    for pid in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            if pid.isdigit() and b"Usage: follow.sh" in words:
                found.append(pid)
    return found


async def test_a_log_that_shrinks_is_noticed_and_followed_on(dash_box):
    # A frame that promises more than the log still holds cannot be told from the next header.
    from gpu_flows.remote.logs import _Frames

    frames = _Frames()
    with pytest.raises(SshDropped, match="cannot be understood"):
        list(frames.feed(b"data 0 10\n12345beat\nbeat\nrubbish\n"))


@pytest.mark.sshd
async def test_a_50_mb_log_over_20_cut_connections_has_the_boxs_sha256(sshd, tmp_path):
    """Written while it is followed; kill -9 of sshd's session, of its parent, and aborts by us."""
    writer = (
        "import sys,time,random\n"
        "r=random.Random(3)\n"
        "for n in range(200):\n"
        "    sys.stdout.buffer.write(r.randbytes(250_000)); sys.stdout.buffer.flush()\n"
        "    time.sleep(0.02)\n"
    )
    chance = random.Random(5)
    raw = RawLog(tmp_path / "log")
    drops: list[str] = []
    async with RemoteBox(sshd.endpoint, sshd.private_key) as box:
        await start(box, f"python3 -c {shlex.quote(writer)}")
        cuts: list[tuple[object, int]] = [(None, 0)]  # the connection that was cut, and where

        def sink(data: bytes) -> None:
            raw.write(data)
            fresh = box._login is not cuts[-1][0] and connections_of(sshd)
            if len(cuts) <= 20 and fresh and raw.offset > cuts[-1][1] + chance.randrange(1_500_000):
                cuts.append((box._login, raw.offset))
                if chance.random() < 0.3:
                    box._login.connection.abort()
                else:
                    for pid in fresh[chance.randrange(len(fresh)) :]:
                        os.kill(pid, signal.SIGKILL)

        status = await follow_j(box, sink, on_drop=lambda error: drops.append(str(error)), deadline_s=100)
        raw.finish()
        assert len(cuts) == 21
        assert len(drops) >= 20
        assert status.log_bytes == raw.offset == 50_000_000
        box_has = hashlib.sha256(log_file(sshd.home).read_bytes()).hexdigest()
        assert [digest.sha256 for digest in raw.digests] == [box_has]
        assert hashlib.sha256((tmp_path / "log").read_bytes()).hexdigest() == box_has
        assert await log_sha256(box, "j", end=50_000_000, timeout_s=20) == box_has
        assert await log_sha256(box, "j", start=100, end=105, timeout_s=20) == (
            hashlib.sha256(log_file(sshd.home).read_bytes()[100:105]).hexdigest()
        )
    # Nobody is left behind on the box, though most of its followers never heard a goodbye.
    await until(lambda: not _followers(), 15)


@pytest.mark.sshd
async def test_a_frozen_server_is_noticed(sshd):
    async with RemoteBox(sshd.endpoint, sshd.private_key, keepalive_s=0.3, keepalive_count=2) as box:
        await start(box, "for n in 1 2 3 4 5 6 7 8; do echo $n; sleep 0.2; done")
        got = bytearray()
        following = asyncio.create_task(follow_j(box, got.extend))
        await until(lambda: b"2\n" in got)
        frozen = connections_of(sshd)
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        assert (await following).exit_code == 0
        assert got == b"1\n2\n3\n4\n5\n6\n7\n8\n"
        for pid in frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.sshd
async def test_a_second_process_continues_a_stored_log_at_the_right_byte(sshd, tmp_path):
    secret = "hf_inventedA1"
    command = f"for n in $(seq 1 40); do echo $n {secret}; sleep 0.02; done; printf {secret[:5]}"
    async with RemoteBox(sshd.endpoint, sshd.private_key) as box:
        await start(box, command)
        masker = Masker({"HF_TOKEN": secret})
        for stop_at in (100, 211, None):
            raw = RawLog(tmp_path / "log", masker)
            following = asyncio.create_task(follow_j(box, raw.write, offset=raw.offset))
            if stop_at is not None:
                await until(lambda raw=raw, stop_at=stop_at: raw.offset >= stop_at)
                following.cancel()
            else:
                await following
                raw.finish()
            raw.close()
        whole = log_file(sshd.home).read_bytes()
        assert (tmp_path / "log").read_bytes() == whole.replace(secret.encode(), b"***")
        assert raw.digests[0].start == 0
        assert raw.digests[-1].end == len(whole)
        for digest in raw.digests:
            args = {"start": digest.start, "end": digest.end, "timeout_s": 20}
            assert await log_sha256(box, "j", **args) == digest.sha256
