from __future__ import annotations

import time

import pytest

from gpu_flows.remote.errors import RemoteScriptFailed
from gpu_flows.remote.loop import blocking
from gpu_flows.remote.ssh import RemoteBox


def test_commands_and_scripts(sshd):
    async def scenario():
        async with RemoteBox(sshd.endpoint, sshd.private_key) as box:
            done = await box.run("pwd; cat; echo oops >&2; exit 3", stdin=b"in\n", timeout_s=10)
            assert (done.exit_status, done.exit_signal) == (3, None)
            assert done.stdout == f"{sshd.home}\nin\n".encode()
            assert done.stderr == b"oops\n"
            assert box.endpoint.host_key.startswith("ssh-ed25519 ")
            reply = await box.script(
                'printf "%s|" "$0" "$@"; cat', "a b", "", "$x'\"\n", stdin=b"z", timeout_s=10
            )
            assert reply == b"gpu-flows|a b||$x'\"\n|z"
            with pytest.raises(RemoteScriptFailed, match="no such thing") as caught:
                await box.script("echo no such thing >&2; exit 5", timeout_s=10)
            assert caught.value.exit_status == 5
            got = b"".join([c async for c in box.stream("seq 1 300000", timeout_s=20)])
            assert got == b"".join(b"%d\n" % n for n in range(1, 300001))

    blocking(scenario(), 60)


def test_c37_a_background_child_does_not_delay_the_result(sshd):
    async def scenario():
        async with RemoteBox(sshd.endpoint, sshd.private_key) as box:
            start = time.monotonic()
            done = await box.run("seq 1 200000; sleep 600 & exit 7", timeout_s=20)
            assert done.exit_status == 7
            assert done.stdout == b"".join(b"%d\n" % n for n in range(1, 200001))
            reply = await box.script("sleep 600 & echo done", timeout_s=20)
            assert reply == b"done\n"
            assert time.monotonic() - start < 5

    blocking(scenario(), 60)


def test_c37_stderr_alone_does_not_hang(sshd):
    async def scenario():
        async with RemoteBox(sshd.endpoint, sshd.private_key) as box:
            done = await box.run("head -c 50000000 /dev/zero >&2; exit 4", timeout_s=30)
            assert done.exit_status == 4
            assert len(done.stderr) == 50_000_000

    blocking(scenario(), 60)
