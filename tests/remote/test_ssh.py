from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import time
from contextlib import aclosing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_flows.remote import framing, ssh
from gpu_flows.remote.errors import OutputTooLarge, RemoteScriptFailed, RemoteTimeout
from gpu_flows.remote.loop import blocking
from gpu_flows.remote.ssh import RemoteBox
from tests.remote.boxes import gone, on_box

NUMBERS = b"".join(b"%d\n" % n for n in range(1, 200_001))


# Commands, scripts, streams


def test_a_command(server):
    async def scenario(box):
        done = await box.run("pwd; cat; echo oops >&2; exit 3", stdin=b"in\n", timeout_s=10)
        assert (done.exit_status, done.exit_signal) == (3, None)
        assert done.stdout == f"{server.home}\nin\n".encode()
        assert done.stderr == b"oops\n"

    on_box(server, scenario)


def test_a_command_has_no_terminal(server):
    async def scenario(box):
        done = await box.run("test -t 0 || test -t 1 || test -t 2", timeout_s=10)
        assert done.exit_status == 1

    on_box(server, scenario)


def test_bytes_are_bytes(server):
    """One byte that is no UTF-8 would close the connection if asyncssh decoded (trap 3)."""
    blob = bytes(range(256)) * 5000

    async def scenario(box):
        assert (await box.run("cat", stdin=blob, timeout_s=10)).stdout == blob
        assert await box.script("cat", stdin=blob, timeout_s=10) == blob

    on_box(server, scenario)


def test_c31_no_encoding_is_assumed_and_no_boundary_matters(server):
    """A character cut at a read boundary, a byte that is none, under LANG=C."""
    code = "import sys; sys.stdout.buffer.write(('x' * 4095 + 'é' + '漢' * 70000).encode() + bytes([255]))"
    want = ("x" * 4095 + "é" + "漢" * 70000).encode() + b"\xff"

    async def scenario(box):
        line = f'LANG=C LC_ALL=C python3 -c "{code}"'
        assert (await box.run(line, timeout_s=20)).stdout == want
        assert await box.script(line, timeout_s=20) == want
        assert b"".join([chunk async for chunk in box.stream(line, timeout_s=20)]) == want

    on_box(server, scenario)


def test_an_exit_by_signal(server):
    async def scenario(box):
        done = await box.run("kill -9 $$", timeout_s=10)
        assert (done.exit_status, done.exit_signal) == (-1, "KILL")
        with pytest.raises(RemoteScriptFailed) as caught:
            await box.script("kill -9 $$", timeout_s=10)
        assert caught.value.exit_status == 128 + 9

    on_box(server, scenario)


def test_a_script_and_its_failure(server):
    async def scenario(box):
        reply = await box.script(
            'printf "%s|" "$0" "$@"; cat', "a b", "", "$x'\"\n", stdin=b"z", timeout_s=10
        )
        assert reply == b"gpu-flows|a b||$x'\"\n|z"
        assert await box.script("exit 0", timeout_s=10) == b""
        assert await box.script("printf '%s' 'no newline'; exec true", timeout_s=10) == b"no newline"
        with pytest.raises(RemoteScriptFailed, match="status 5: no such thing") as caught:
            await box.script("echo no such thing >&2; exit 5", timeout_s=10)
        assert (caught.value.exit_status, caught.value.stderr) == (5, b"no such thing\n")
        with pytest.raises(RemoteScriptFailed):
            await box.script("if", timeout_s=10)

    on_box(server, scenario)


def test_long_scripts_travel_and_too_long_ones_are_refused(server):
    async def scenario(box):
        text = ": '" + "x" * 90_000 + "'\necho done"
        assert await box.script(text, timeout_s=10) == b"done\n"
        with pytest.raises(ValueError, match="stdin"):
            await box.script("true", "x" * 100_000, timeout_s=10)
        with pytest.raises(ValueError, match="NUL"):
            await box.script("true", "\0", timeout_s=10)

    on_box(server, scenario)


def test_a_stream(server):
    async def scenario(box):
        chunks = [chunk async for chunk in box.stream('seq 1 "$1"', "200000", timeout_s=20)]
        assert b"".join(chunks) == NUMBERS
        assert max(map(len, chunks)) <= 256 * 1024
        echoed = [chunk async for chunk in box.stream("cat", stdin=NUMBERS, timeout_s=20)]
        assert b"".join(echoed) == NUMBERS
        got = b""
        with pytest.raises(RemoteScriptFailed, match="status 4: too bad"):
            async for chunk in box.stream("echo some; echo too bad >&2; exit 4", timeout_s=20):
                got += chunk
        assert got == b"some\n"

    on_box(server, scenario)


def test_a_stream_waits_for_its_reader_and_ends_with_it(server):
    async def scenario(box):
        async with aclosing(box.stream("echo $$; exec cat /dev/zero", timeout_s=20)) as stream:
            pid = int((await anext(stream)).partition(b"\n")[0])
            await asyncio.sleep(0.5)
            got = sum([len(await anext(stream)) for _ in range(100)])
            assert got < 100 << 20
        await gone(pid)

    on_box(server, scenario)


def test_a_large_upload_on_stdin_is_fed_from_an_iterator(server):
    async def blocks():
        for n in range(320):
            yield bytes([n % 256]) * (64 << 10)

    want = hashlib.sha256(b"".join(bytes([n % 256]) * (64 << 10) for n in range(320))).hexdigest()

    async def scenario(box):
        reply = await box.script("sha256sum", stdin=blocks(), timeout_s=30)
        assert reply.split()[0].decode() == want

    on_box(server, scenario)


def test_a_command_that_does_not_read_its_stdin(server):
    async def scenario(box):
        done = await box.run("exit 3", stdin=b"x" * (8 << 20), timeout_s=10)
        assert done.exit_status == 3
        done = await box.run("head -c 5", stdin=b"x" * (8 << 20), timeout_s=10)
        assert done.stdout == b"xxxxx"

    on_box(server, scenario)


def test_a_source_that_fails_ends_the_command(server):
    async def broken():
        yield b"some"
        raise ZeroDivisionError

    async def scenario(box):
        with pytest.raises(ZeroDivisionError):
            await box.script("cat", stdin=broken(), timeout_s=10)
        with pytest.raises(ZeroDivisionError):
            async for _ in box.stream("cat", stdin=broken(), timeout_s=10):
                pass
        assert await box.script("echo well", timeout_s=10) == b"well\n"

    on_box(server, scenario)


words = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=30)


@given(args=st.lists(words, max_size=6))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_c45_arguments_arrive_byte_for_byte(shared_box, args):
    reply = blocking(shared_box.script('for a; do printf "%s\\0" "$a"; done', *args, timeout_s=10))
    assert reply == b"".join(arg.encode() + b"\0" for arg in args)


@pytest.fixture
def shared_box(server):
    box = RemoteBox(server.endpoint, server.private_key)
    yield box
    blocking(box.close())


# Ends (C37)


def test_c37_a_background_child_does_not_delay_the_result(server):
    async def scenario(box):
        start = time.monotonic()
        done = await box.run("seq 1 200000; sleep 600 & exit 7", timeout_s=20)
        assert done.exit_status == 7
        assert done.stdout == NUMBERS
        assert await box.script("sleep 600 & seq 1 200000", timeout_s=20) == NUMBERS
        streamed = [chunk async for chunk in box.stream("sleep 600 & seq 1 200000", timeout_s=20)]
        assert b"".join(streamed) == NUMBERS
        assert time.monotonic() - start < 8

    on_box(server, scenario)


def test_c37_nor_does_one_that_never_stops_writing(server, monkeypatch):
    monkeypatch.setattr(ssh, "_SETTLE_S", 1.0)

    async def scenario(box):
        start = time.monotonic()
        done = await box.run("{ while :; do echo y; sleep 0.1; done & } ; exit 7", timeout_s=20)
        assert done.exit_status == 7
        reply = await box.script("{ while :; do echo y; sleep 0.1; done & } ; echo done", timeout_s=20)
        assert b"done\n" in reply
        assert time.monotonic() - start < 10

    on_box(server, scenario)


def test_c37_stderr_alone_does_not_hang(server):
    async def scenario(box):
        done = await box.run("head -c 50000000 /dev/zero >&2; exit 4", timeout_s=30)
        assert (done.exit_status, len(done.stderr)) == (4, 50_000_000)
        with pytest.raises(RemoteScriptFailed, match="exit status 4"):
            async for _ in box.stream("head -c 50000000 /dev/zero >&2; exit 4", timeout_s=30):
                pass

    on_box(server, scenario)


def test_c37_every_wait_has_a_deadline(server):
    async def scenario(box):
        start = time.monotonic()
        with pytest.raises(RemoteTimeout, match=r"did not end within 0\.5 s"):
            await box.run("exec sleep 600", timeout_s=0.5)
        with pytest.raises(RemoteTimeout):
            await box.script("sleep 600", timeout_s=0.5)
        with pytest.raises(RemoteTimeout):
            async for _ in box.stream("sleep 600", timeout_s=0.5):
                pass
        assert time.monotonic() - start < 5

    on_box(server, scenario)


def test_a_reply_without_end_is_cut(server, monkeypatch):
    monkeypatch.setattr(ssh, "_OUTPUT_LIMIT_BYTES", 4 << 20)

    async def scenario(box):
        with pytest.raises(OutputTooLarge, match="more than 4 MiB"):
            await box.run("exec cat /dev/zero", timeout_s=20)
        assert await box.script("echo well", timeout_s=10) == b"well\n"

    on_box(server, scenario)


def test_a_detached_process_outlives_the_connection(server):
    async def scenario(box):
        reply = await box.script("setsid sleep 600 >/dev/null 2>&1 & echo $!", timeout_s=10)
        return int(reply)

    pid = on_box(server, scenario)
    assert Path(f"/proc/{pid}").exists()
    os.kill(pid, signal.SIGKILL)


# A noisy login shell


def test_noise_of_bashrc_stays_out_of_replies(sshd):
    (sshd.home / ".bashrc").write_text("echo Welcome; printf 'no newline'; echo a warning >&2; sleep 0.2\n")

    async def scenario(box):
        assert b"Welcome" in (await box.run("true", timeout_s=10)).stdout
        assert await box.script("echo reply", timeout_s=10) == b"reply\n"
        streamed = [chunk async for chunk in box.stream("echo reply", timeout_s=10)]
        assert b"".join(streamed) == b"reply\n"
        with pytest.raises(RemoteScriptFailed) as caught:
            await box.script("echo mine >&2; exit 2", timeout_s=10)
        assert caught.value.stderr == b"mine\n"

    on_box(sshd, scenario)


def test_a_login_shell_that_runs_nothing_is_told_from_a_reply(sshd):
    (sshd.home / ".bashrc").write_text("echo This account is currently not available.; exit 1\n")

    async def scenario(box):
        with pytest.raises(RemoteScriptFailed, match="currently not available"):
            await box.script("echo reply", timeout_s=10)
        with pytest.raises(RemoteScriptFailed, match="currently not available"):
            async for _ in box.stream("echo reply", timeout_s=10):
                pass

    on_box(sshd, scenario)


def test_a_login_shell_that_never_stops_printing_is_cut(sshd):
    (sshd.home / ".bashrc").write_text("yes\n")

    async def scenario(box):
        with pytest.raises(RemoteScriptFailed, match="y\ny"):
            async for _ in box.stream("echo reply", timeout_s=20):
                pass

    on_box(sshd, scenario)


@given(st.binary(max_size=50), st.binary(max_size=200), st.binary(max_size=50))
def test_a_framed_reply_is_found_in_any_noise(before, reply, after):
    nonce = framing.new_nonce()
    end = f"\n{nonce} end 0\n".encode()
    whole = before + framing.begin_line(nonce) + reply + end + after
    assert framing.find_reply(nonce, whole) == framing.Reply(0, reply)
    assert framing.find_reply(nonce, whole[: -len(end + after)]) is None
