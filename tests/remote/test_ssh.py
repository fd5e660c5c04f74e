from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import signal
import socket
import time
from contextlib import aclosing
from pathlib import Path

import asyncssh
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_flows.endpoint import SshEndpoint
from gpu_flows.remote import framing, ssh
from gpu_flows.remote.connect import log_in
from gpu_flows.remote.errors import (
    HostKeyChanged,
    OutputTooLarge,
    RemoteScriptFailed,
    RemoteTimeout,
    SshAuthenticationFailed,
    SshDropped,
    SshUnreachable,
)
from gpu_flows.remote.loop import blocking
from gpu_flows.remote.ssh import RemoteBox, polite_backoff

NUMBERS = b"".join(b"%d\n" % n for n in range(1, 200_001))


def on_box(server, scenario, *, endpoint=None, **options):
    """Run a scenario with a box on the background loop."""

    async def whole():
        async with RemoteBox(endpoint or server.endpoint, server.private_key, **options) as box:
            return await scenario(box)

    return blocking(whole(), 60)


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


async def gone(pid):
    async with asyncio.timeout(10):
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.02)


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


@given(st.binary(max_size=50), st.binary(max_size=200), st.binary(max_size=50))
def test_a_framed_reply_is_found_in_any_noise(before, reply, after):
    nonce = framing.new_nonce()
    end = f"\n{nonce} end 0\n".encode()
    whole = before + framing.begin_line(nonce) + reply + end + after
    assert framing.find_reply(nonce, whole) == framing.Reply(0, reply)
    assert framing.find_reply(nonce, whole[: -len(end + after)]) is None


# Host keys (C27)


def test_c27_the_host_key_is_pinned_at_first_contact(server):
    async def scenario(box):
        assert box.endpoint.host_key is None
        await box.run("true", timeout_s=10)
        return box.endpoint

    endpoint = on_box(server, scenario)
    assert endpoint.host_key.startswith("ssh-ed25519 ")
    assert len(endpoint.host_key.split()) == 2
    assert on_box(server, scenario_true, endpoint=endpoint) == 0


async def scenario_true(box):
    return (await box.run("true", timeout_s=10)).exit_status


@pytest.mark.parametrize("algorithm", ["ssh-ed25519", "ssh-rsa", "ecdsa-sha2-nistp256"])
def test_c27_another_host_key_is_an_error_and_known_hosts_is_left_alone(
    sshd, algorithm, tmp_path, monkeypatch
):
    """The address went to another machine between two contacts; the user's file knows yet another key."""
    monkeypatch.setenv("HOME", str(tmp_path))
    known_hosts = tmp_path / ".ssh" / "known_hosts"
    known_hosts.parent.mkdir()
    yesterday = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode()
    known_hosts.write_text(f"[127.0.0.1]:{sshd.endpoint.port} {yesterday}")
    before = (known_hosts.read_bytes(), os.stat(known_hosts).st_mtime_ns)
    (tmp_path / ".ssh" / "config").write_text("Host *\n Port 1\n User nobody\n")

    async def scenario(box):
        assert (await box.run("true", timeout_s=10)).exit_status == 0
        first = box.endpoint.host_key
        sshd.stop()
        second = sshd.new_host_key(algorithm)
        sshd.start()
        with pytest.raises(HostKeyChanged) as caught:
            await box.run("touch sent", timeout_s=10)
        assert first in str(caught.value)
        if algorithm == "ssh-ed25519":
            assert second in str(caught.value)
        with pytest.raises(HostKeyChanged):
            await box.wait_until_reachable(deadline_s=10)
        assert box.endpoint.host_key == first

    on_box(sshd, scenario)
    assert not (sshd.home / "sent").exists()
    assert on_box(sshd, scenario_true) == 0  # a new box at the same address
    assert before == (known_hosts.read_bytes(), os.stat(known_hosts).st_mtime_ns)


def test_the_same_key_is_asked_for_at_every_contact(make_sshd):
    """A server with several keys: the unpinned contact must not pin one that the pinned one never sees."""
    server = make_sshd()
    server.stop()
    rsa = server.folder / "host_key_rsa"
    rsa.touch(mode=0o600)
    rsa.write_bytes(asyncssh.generate_private_key("ssh-rsa").export_private_key("openssh"))
    server.options["HostKey"] = f"{rsa}\nHostKey {server.folder}/host_key"
    server.start()

    async def scenario(box):
        await box.run("true", timeout_s=10)
        return box.endpoint

    endpoint = on_box(server, scenario)
    assert endpoint.host_key.startswith("ssh-ed25519 ")
    assert on_box(server, scenario, endpoint=endpoint) == endpoint


def test_an_rsa_host_key_is_pinned_too(make_sshd):
    server = make_sshd()
    server.stop()
    server.new_host_key("ssh-rsa")
    server.start()

    async def scenario(box):
        await box.run("true", timeout_s=10)
        return box.endpoint

    endpoint = on_box(server, scenario)
    assert endpoint.host_key.startswith("ssh-rsa ")
    assert on_box(server, scenario, endpoint=endpoint) == endpoint


# Connections that fail


def test_a_refused_connection(client_key):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = SshEndpoint("127.0.0.1", unused.getsockname()[1])
        box = RemoteBox(endpoint, client_key.export_private_key("openssh").decode())
        with pytest.raises(SshUnreachable, match="refuses connections") as caught:
            blocking(box.run("true", timeout_s=10))
        assert caught.value.retryable
        with pytest.raises(SshUnreachable, match=r"gave up .* refuses connections"):
            blocking(box.wait_until_reachable(deadline_s=0.5))


def test_a_name_that_does_not_resolve(client_key):
    box = RemoteBox(SshEndpoint("box.invalid"), client_key.export_private_key("openssh").decode())
    with pytest.raises(SshUnreachable, match=r"box\.invalid:22 does not resolve"):
        blocking(box.run("true", timeout_s=30))


def test_a_peer_that_accepts_and_says_nothing(client_key):
    key = client_key.export_private_key("openssh").decode()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        endpoint = SshEndpoint("127.0.0.1", mute.getsockname()[1])
        with pytest.raises(SshUnreachable, match=r"did not finish the login within 0\.3 s"):
            blocking(RemoteBox(endpoint, key, login_timeout_s=0.3).run("true", timeout_s=10))
        with pytest.raises(SshUnreachable, match=r"did not take a command within 0\.3 s"):
            blocking(RemoteBox(endpoint, key).run("true", timeout_s=0.3))


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"SSH-2.0-x\r\n" + b"\0" * 100])
def test_a_peer_that_speaks_something_else(client_key, answer):
    async def scenario():
        async def talk(_reader, writer):
            writer.write(answer)
            writer.close()

        peer = await asyncio.start_server(talk, "127.0.0.1", 0)
        endpoint = SshEndpoint("127.0.0.1", peer.sockets[0].getsockname()[1])
        box = RemoteBox(endpoint, client_key.export_private_key("openssh").decode())
        try:
            with pytest.raises(SshUnreachable):
                await box.run("true", timeout_s=10)
        finally:
            peer.close()

    blocking(scenario(), 30)


def test_a_key_that_is_not_accepted(server):
    stranger = asyncssh.generate_private_key("ssh-ed25519").export_private_key("openssh").decode()
    box = RemoteBox(server.endpoint, stranger)
    with pytest.raises(SshAuthenticationFailed, match="does not accept our key"):
        blocking(box.run("true", timeout_s=10))
    start = time.monotonic()
    with pytest.raises(SshAuthenticationFailed, match="gave up"):
        blocking(box.wait_until_reachable(deadline_s=60, authentication_grace_s=0.5))
    assert time.monotonic() - start < 10


def test_waiting_for_a_box_that_is_still_booting(sshd):
    """First nothing listens, then the key is not installed yet."""
    sshd.stop()
    keys = (sshd.folder / "authorized_keys").read_text()
    (sshd.folder / "authorized_keys").write_text("")
    failures = []

    def backoff(n):
        failures.append(n)
        if n == 3:
            sshd.start()
        if n == 6:
            (sshd.folder / "authorized_keys").write_text(keys)
        return 0.05

    async def scenario(box):
        await box.wait_until_reachable(deadline_s=20, backoff=backoff)
        assert await scenario_true(box) == 0

    on_box(sshd, scenario)
    assert failures == [1, 2, 3, 4, 5, 6]


def test_the_default_backoff_is_polite():
    """OpenSSH 9.8 and newer penalise an address for quick failures."""
    assert all(5 <= polite_backoff(n) <= 16 for n in range(1, 50))


# Connections that are lost


def test_a_lost_connection_is_noticed_and_made_again(sshd):
    async def scenario(box):
        command = asyncio.create_task(box.run("echo > started; sleep 600", timeout_s=30))
        await exists(sshd.home / "started")
        for pid in sshd.connections():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(SshDropped, match="lost while a command ran"):
            await command
        assert await scenario_true(box) == 0

    on_box(sshd, scenario)


async def exists(path):
    async with asyncio.timeout(10):
        while not path.exists():
            await asyncio.sleep(0.01)


def test_a_half_open_peer_is_noticed(sshd):
    """A peer that is there but silent, as after a broken NAT table: only keepalives notice."""

    async def scenario(box):
        start = time.monotonic()
        async with aclosing(box.stream("echo started; exec sleep 600", timeout_s=60)) as stream:
            await anext(stream)
            freeze(sshd)
            with pytest.raises(SshDropped, match="not responding to keepalive"):
                await anext(stream)
        assert await scenario_true(box) == 0  # over a new connection
        freeze(sshd)
        assert await scenario_true(box) == 0  # it had not been handed over yet, so it is tried again
        assert time.monotonic() - start < 10

    on_box(sshd, scenario, keepalive_s=0.2, keepalive_count=3)


def freeze(sshd):
    for pid in sshd.connections():
        os.kill(pid, signal.SIGSTOP)


def test_keepalives_do_not_cut_a_silent_command(server):
    async def scenario(box):
        assert (await box.run("sleep 1.5; echo done", timeout_s=20)).stdout == b"done\n"

    on_box(server, scenario, keepalive_s=0.2, keepalive_count=3)


def test_one_connection_serves_many_commands(sshd):
    async def scenario(box):
        replies = await asyncio.gather(*(box.script("echo $1", str(n), timeout_s=20) for n in range(30)))
        assert replies == [b"%d\n" % n for n in range(30)]

    on_box(sshd, scenario)
    assert (sshd.folder / "sshd.log").read_text().count("Accepted publickey") == 1


def test_commands_wait_where_the_server_allows_fewer_sessions(make_sshd):
    server = make_sshd(MaxSessions="2")

    async def scenario(box):
        replies = await asyncio.gather(
            *(box.script("sleep 0.05; echo $1", str(n), timeout_s=20) for n in range(12))
        )
        assert replies == [b"%d\n" % n for n in range(12)]

    on_box(server, scenario)
    assert (server.folder / "sshd.log").read_text().count("Accepted publickey") == 1


def test_sessions_that_are_used_up_by_others_cost_a_new_connection(make_sshd):
    server = make_sshd(MaxSessions="1")

    async def scenario(box):
        # It ignores the signal, so its session stays in use on the server after we have given up.
        with pytest.raises(RemoteTimeout):
            await box.run("trap '' TERM HUP; sleep 600 & wait; sleep 600", timeout_s=0.5)
        assert await scenario_true(box) == 0

    on_box(server, scenario)


def test_many_boxes_at_once_pass_the_limit_on_logins(make_sshd):
    """Stock limits of sshd: 10 unauthenticated connections, then it starts to refuse."""
    server = make_sshd(MaxStartups="10:100:10")

    async def scenario():
        boxes = [RemoteBox(server.endpoint, server.private_key) for _ in range(30)]
        assert await asyncio.gather(*map(scenario_true, boxes)) == [0] * 30
        await asyncio.gather(*(box.close() for box in boxes))

    blocking(scenario(), 60)


# A jump host


def test_a_jump_host(sshd, server):
    endpoint = dataclasses.replace(server.endpoint, proxy=sshd.endpoint)

    async def scenario(box):
        assert await box.script("pwd", timeout_s=10) == f"{server.home}\n".encode()
        return box.endpoint

    pinned = on_box(server, scenario, endpoint=endpoint)
    assert pinned.host_key.startswith("ssh-ed25519 ")
    assert pinned.proxy.host_key.startswith("ssh-ed25519 ")
    sshd.stop()
    sshd.new_host_key()
    sshd.start()
    with pytest.raises(HostKeyChanged, match=str(sshd.endpoint.port)):
        on_box(server, scenario, endpoint=pinned)


def test_a_jump_host_that_cannot_reach_the_box(sshd):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = SshEndpoint("127.0.0.1", unused.getsockname()[1], "root", proxy=sshd.endpoint)
        with pytest.raises(SshUnreachable, match=r"the jump host cannot reach root@127\.0\.0\.1"):
            on_box(sshd, scenario_true, endpoint=endpoint)


def test_a_login_that_fails_leaves_no_connection_to_the_jump_host(sshd):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = SshEndpoint("127.0.0.1", unused.getsockname()[1], "root", proxy=sshd.endpoint)

        async def scenario():
            with pytest.raises(SshUnreachable):
                await log_in(endpoint, asyncssh.import_private_key(sshd.private_key), ssh.ConnectOptions())
            async with asyncio.timeout(10):
                while sshd.connections():
                    await asyncio.sleep(0.02)

        blocking(scenario(), 30)


# The event loop


def test_a_box_belongs_to_one_loop(sshd):
    box = RemoteBox(sshd.endpoint, sshd.private_key)
    assert blocking(scenario_true(box)) == 0
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(scenario_true(box))
    blocking(box.close())


def test_a_login_shell_that_never_stops_printing_is_cut(sshd):
    (sshd.home / ".bashrc").write_text("yes\n")

    async def scenario(box):
        with pytest.raises(RemoteScriptFailed, match="y\ny"):
            async for _ in box.stream("echo reply", timeout_s=20):
                pass

    on_box(sshd, scenario)
