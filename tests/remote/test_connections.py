from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import time
from contextlib import aclosing

import asyncssh
import pytest

from gpu_flows.endpoint import SshEndpoint
from gpu_flows.remote import ssh
from gpu_flows.remote.connect import log_in
from gpu_flows.remote.errors import (
    HostKeyChanged,
    RemoteTimeout,
    SshAuthenticationFailed,
    SshDropped,
    SshUnreachable,
)
from gpu_flows.remote.loop import blocking
from gpu_flows.remote.ssh import RemoteBox, polite_backoff
from tests.remote.boxes import exists, on_box, signal_connections, succeeds

# Host keys (C27)


def test_c27_the_host_key_is_pinned_at_first_contact(server):
    async def scenario(box):
        assert box.endpoint.host_key is None
        await box.run("true", timeout_s=10)
        return box.endpoint

    endpoint = on_box(server, scenario)
    assert endpoint.host_key.startswith("ssh-ed25519 ")
    assert len(endpoint.host_key.split()) == 2
    assert on_box(server, succeeds, endpoint=endpoint) == 0


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
    assert on_box(sshd, succeeds) == 0  # a new box at the same address
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
        assert await succeeds(box) == 0

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
        signal_connections(sshd)
        with pytest.raises(SshDropped, match="lost while a command ran"):
            await command
        assert await succeeds(box) == 0

    on_box(sshd, scenario)


def test_a_half_open_peer_is_noticed(sshd):
    """A peer that is there but silent, as after a broken NAT table: only keepalives notice."""

    async def scenario(box):
        start = time.monotonic()
        async with aclosing(box.stream("echo started; exec sleep 600", timeout_s=60)) as stream:
            await anext(stream)
            signal_connections(sshd, signal.SIGSTOP)
            with pytest.raises(SshDropped, match="not responding to keepalive"):
                await anext(stream)
        assert await succeeds(box) == 0  # over a new connection
        signal_connections(sshd, signal.SIGSTOP)
        assert await succeeds(box) == 0  # it had not been handed over yet, so it is tried again
        assert time.monotonic() - start < 10

    on_box(sshd, scenario, keepalive_s=0.2, keepalive_count=3)


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
        assert await succeeds(box) == 0

    on_box(server, scenario)


def test_many_boxes_at_once_pass_the_limit_on_logins(make_sshd):
    """Stock limits of sshd: 10 unauthenticated connections, then it starts to refuse."""
    server = make_sshd(MaxStartups="10:100:10")

    async def scenario():
        boxes = [RemoteBox(server.endpoint, server.private_key) for _ in range(30)]
        assert await asyncio.gather(*map(succeeds, boxes)) == [0] * 30
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
            on_box(sshd, succeeds, endpoint=endpoint)


def test_a_login_that_fails_leaves_no_connection_to_the_jump_host(sshd):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = SshEndpoint("127.0.0.1", unused.getsockname()[1], "root", proxy=sshd.endpoint)

        async def scenario():
            with pytest.raises(SshUnreachable):
                await log_in(endpoint, [asyncssh.import_private_key(sshd.private_key)], ssh.ConnectOptions())
            async with asyncio.timeout(10):
                while sshd.connections():
                    await asyncio.sleep(0.02)

        blocking(scenario(), 30)


# The event loop


def test_a_box_belongs_to_one_loop(sshd):
    box = RemoteBox(sshd.endpoint, sshd.private_key)
    assert blocking(succeeds(box)) == 0
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(succeeds(box))
    blocking(box.close())
