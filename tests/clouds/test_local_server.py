"""The embedded SSH server behaves as a real sshd where a client can tell the difference."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from gpu_flows.endpoint import SshEndpoint
from tests.clouds.contract import until
from tests.clouds.embedded_server import embedded_server
from tests.clouds.ssh_client import PUBLIC_KEY, connect, run


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("box")


@pytest.fixture(scope="module")
def endpoint(root: Path) -> Iterator[SshEndpoint]:
    secret = "invented-secret-of-the-orchestrator"
    os.environ["AWS_SECRET_ACCESS_KEY"] = secret
    with embedded_server(root, PUBLIC_KEY) as endpoint:
        del os.environ["AWS_SECRET_ACCESS_KEY"]
        yield endpoint


@pytest.fixture
def server(root: Path) -> int:
    return int(json.loads((root / "server.json").read_text())["pid"])


def over(endpoint: SshEndpoint, talk: Callable[[asyncssh.SSHClientConnection], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with connect(endpoint) as connection, asyncio.timeout(60):
            return await talk(connection)

    return asyncio.run(main())


def test_the_endpoint_says_where_and_with_which_key(root: Path, endpoint: SshEndpoint) -> None:
    assert endpoint.host == "127.0.0.1"
    assert endpoint.host_key is not None
    assert endpoint.host_key.startswith("ssh-ed25519 ")
    assert (root / "host_key").stat().st_mode & 0o777 == 0o600


def test_a_command_gets_the_environment_of_the_box_and_nothing_else(
    root: Path, endpoint: SshEndpoint, server: int
) -> None:
    output = run(endpoint, "env; pwd; umask; id >/dev/null; echo ~").stdout.decode().splitlines()
    home = str(root / "home")
    assert output[-3:] == [home, "0022", home]
    names = {line.partition("=")[0] for line in output[:-3]}
    # PWD (and on some shells _, OLDPWD, SHLVL) is the shell's own.
    assert names - {"PWD", "OLDPWD", "SHLVL", "_"} == {
        "GPU_FLOWS_BOX_ID", "HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TMPDIR", "USER",
    }  # fmt: skip
    assert run(endpoint, "command -v python").stdout.decode().strip() == str(
        Path(sys.executable).parent / "python"
    )


def test_c51_a_command_sees_no_secret_of_the_orchestrator(endpoint: SshEndpoint) -> None:
    assert b"invented-secret" not in run(endpoint, "env; cat /proc/self/environ").stdout


def test_what_the_client_wants_to_set_is_ignored(endpoint: SshEndpoint) -> None:
    output = over(endpoint, lambda c: c.run("env", env={"LD_PRELOAD": "x", "LC_ALL": "C"}))
    assert "LD_PRELOAD" not in output.stdout
    assert "LC_ALL" not in output.stdout


def test_bytes_pass_exactly_both_ways(endpoint: SshEndpoint) -> None:
    data = bytes(range(256)) * 3 + b"\r\n\xff\xfe\x00"
    result = run(endpoint, "cat; printf '\\377\\000err' >&2; exit 3", data)
    assert (result.stdout, result.stderr, result.exit_status) == (data, b"\xff\x00err", 3)


@pytest.mark.parametrize("reader", ["sha256sum", "sleep 0.3; sha256sum", "cat | cat | sha256sum"])
def test_no_byte_of_a_large_input_is_lost_however_slowly_it_is_read(
    endpoint: SshEndpoint, reader: str
) -> None:
    data = os.urandom(1 << 20) * 20
    assert run(endpoint, reader, data).stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()


def test_a_large_log_arrives_whole_and_fast(endpoint: SshEndpoint) -> None:
    size = 200_000_000

    async def talk(connection: asyncssh.SSHClientConnection) -> int:
        received = 0
        async with connection.create_process(f"head -c {size} /dev/zero", encoding=None) as process:
            while chunk := await process.stdout.read(1 << 18):
                received += len(chunk)
        return received

    assert over(endpoint, talk) == size


def test_c37_fifty_megabytes_on_stderr_alone(endpoint: SshEndpoint) -> None:
    result = run(endpoint, "head -c 50000000 /dev/zero >&2; exit 7")
    assert (len(result.stderr), result.stdout, result.exit_status) == (50_000_000, b"", 7)


def test_a_client_that_does_not_read_stops_the_command(endpoint: SshEndpoint) -> None:
    async def talk(connection: asyncssh.SSHClientConnection) -> int:
        process = await connection.create_process(
            "echo $$; exec cat /dev/zero", encoding=None, window=1 << 20
        )
        pid = int(await process.stdout.readline())
        written, before = 0, -1
        while written != before:  # until it no longer gets on
            await asyncio.sleep(0.2)
            before, written = written, _written_by(pid)
        os.kill(pid, signal.SIGKILL)
        return written

    assert 0 < over(endpoint, talk) < 32 << 20


def _written_by(pid: int) -> int:
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar")))


@pytest.mark.parametrize(("number", "name"), [(9, "KILL"), (15, "TERM"), (11, "SEGV")])
def test_death_by_a_signal_is_told(endpoint: SshEndpoint, number: int, name: str) -> None:
    result = run(endpoint, f"kill -{number} $$")
    assert result.exit_signal is not None
    assert (result.exit_signal[0], result.returncode) == (name, -number)


def test_c37_the_status_is_told_while_a_background_process_holds_the_pipes(endpoint: SshEndpoint) -> None:
    async def talk(connection: asyncssh.SSHClientConnection) -> None:
        process = await connection.create_process("sleep 600 & echo $!; exit 7", encoding=None)
        child = int(await process.stdout.readline())
        while process.exit_status is None:
            await asyncio.sleep(0.01)
        assert process.exit_status == 7
        # The stream itself stays open until the child ends: so it does with sshd.
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process.stdout.read(1), 0.3)
        os.kill(child, signal.SIGKILL)
        assert await process.stdout.read() == b""
        await process.wait_closed()

    over(endpoint, talk)


def test_a_signal_from_the_client_reaches_the_whole_group(endpoint: SshEndpoint) -> None:
    async def talk(connection: asyncssh.SSHClientConnection) -> asyncssh.SSHCompletedProcess:
        process = await connection.create_process("sleep 600 & echo here; wait", encoding=None)
        await process.stdout.readline()
        process.send_signal("INT")  # ignored by background processes of sh
        process.terminate()
        return await process.wait()

    assert over(endpoint, talk).exit_signal[0] in ("TERM", "INT")


def test_a_signal_is_heard_after_the_end_of_the_input(endpoint: SshEndpoint) -> None:
    async def talk(connection: asyncssh.SSHClientConnection) -> asyncssh.SSHCompletedProcess:
        process = await connection.create_process("cat; echo here; exec sleep 600", encoding=None)
        process.stdin.write_eof()
        await process.stdout.readline()
        process.send_signal("USR1")
        return await process.wait()

    assert over(endpoint, talk).exit_signal[0] == "USR1"


def test_a_command_that_does_not_read_keeps_no_client_waiting(endpoint: SshEndpoint) -> None:
    result = run(endpoint, "exec <&-; echo fine; exit 2", os.urandom(8 << 20))
    assert (result.stdout, result.exit_status) == (b"fine\n", 2)


def test_a_signal_to_a_command_that_has_ended_harms_nobody(endpoint: SshEndpoint) -> None:
    async def talk(connection: asyncssh.SSHClientConnection) -> None:
        process = await connection.create_process("sleep 600 & echo $!; exit 0", encoding=None)
        child = int(await process.stdout.readline())
        while process.exit_status is None:
            await asyncio.sleep(0.01)
        process.terminate()
        assert (await connection.run("echo still here")).stdout == "still here\n"
        os.kill(child, signal.SIGKILL)
        await process.wait_closed()

    over(endpoint, talk)


def test_a_command_outlives_its_connection_and_only_its_pipes_close(
    root: Path, endpoint: SshEndpoint
) -> None:
    script = (
        "trap '' PIPE; echo $$; while echo x 2>/dev/null; do sleep 0.02; done; "
        "read line || echo closed > closed; exec sleep 600"
    )

    async def main() -> int:
        connection = await connect(endpoint)
        process = await connection.create_process(script, encoding=None)
        pid = int(await process.stdout.readline())
        connection.abort()
        return pid

    pid = asyncio.run(main())
    until((root / "home" / "closed").exists, "both pipes are closed")
    assert Path(f"/proc/{pid}").exists()
    os.kill(pid, signal.SIGKILL)


def test_too_long_a_command_is_a_failed_command(endpoint: SshEndpoint) -> None:
    result = run(endpoint, "true " + "x" * 200_000)
    assert result.exit_status == 126
    assert b"too long" in result.stderr
    assert run(endpoint, "echo fine").stdout == b"fine\n"


def test_a_shell_without_a_command_reads_its_input(endpoint: SshEndpoint) -> None:
    async def talk(connection: asyncssh.SSHClientConnection) -> asyncssh.SSHCompletedProcess:
        process = await connection.create_process()
        return_ = process.communicate("echo hello; exit 4\n")
        assert (await return_)[0] == "hello\n"
        return await process.wait()

    assert over(endpoint, talk).exit_status == 4


# A terminal


def test_an_interactive_shell_has_a_terminal_of_the_client_s_size(endpoint: SshEndpoint) -> None:
    async def talk(connection: asyncssh.SSHClientConnection) -> tuple[str, int | None]:
        process = await connection.create_process(term_type="xterm-256color", term_size=(101, 41))
        process.stdin.write("stty size; echo $TERM; stty -echo; echo rea''dy\n")
        before = await process.stdout.readuntil("ready")
        process.change_terminal_size(120, 50)
        process.stdin.write("trap 'echo got''-int' INT; stty size; echo sle''eping; sleep 600\n")
        before += await process.stdout.readuntil("sleeping")
        process.stdin.write("\x03")
        before += await process.stdout.readuntil("got-int")
        process.stdin.write("exit 5\n")
        after = await process.stdout.read()
        await process.wait_closed()
        return before + after, process.exit_status

    text, status = over(endpoint, talk)
    assert "41 101" in text
    assert "xterm-256color" in text
    assert "50 120" in text
    assert status == 5


def test_a_command_on_a_terminal_dies_with_its_connection(root: Path, endpoint: SshEndpoint) -> None:
    async def main() -> int:
        connection = await connect(endpoint)
        process = await connection.create_process("echo $$; exec sleep 600", term_type="xterm")
        pid = int(await process.stdout.readline())
        connection.abort()
        return pid

    pid = asyncio.run(main())
    until(lambda: not Path(f"/proc/{pid}").exists(), "it has hung up")


def test_a_terminal_session_ends_with_its_shell(endpoint: SshEndpoint) -> None:
    async def talk(connection: asyncssh.SSHClientConnection) -> str:
        process = await connection.create_process(
            "trap '' HUP; sleep 600 & echo $!; exit 0", term_type="xterm"
        )
        output = await process.stdout.read()
        await process.wait_closed()
        return str(output)

    os.kill(int(over(endpoint, talk)), signal.SIGKILL)


# Who may do what


def test_only_the_one_key_may_log_in(endpoint: SshEndpoint) -> None:
    async def refused(**options: Any) -> None:
        with pytest.raises(asyncssh.PermissionDenied):
            await connect(endpoint, **options)

    other = asyncssh.generate_private_key("ssh-ed25519")
    asyncio.run(refused(client_keys=[other]))
    asyncio.run(refused(client_keys=None, password="box", preferred_auth="password"))
    asyncio.run(refused(client_keys=None, preferred_auth="none"))


def test_any_user_name_will_do(endpoint: SshEndpoint) -> None:
    over_as_root = SshEndpoint(endpoint.host, endpoint.port, "root", endpoint.host_key)
    assert run(over_as_root, "echo $USER").stdout == b"box\n"


def test_there_is_no_sftp_and_no_forwarding(endpoint: SshEndpoint) -> None:
    async def talk(connection: asyncssh.SSHClientConnection) -> None:
        with pytest.raises(asyncssh.ChannelOpenError):
            await connection.start_sftp_client()
        with pytest.raises(asyncssh.ChannelOpenError):
            await connection.create_process(subsystem="netconf", encoding=None)
        with pytest.raises(asyncssh.ChannelOpenError):
            await connection.open_connection(endpoint.host, endpoint.port)
        with pytest.raises(asyncssh.ChannelListenError):
            await connection.forward_remote_port("", 0, "127.0.0.1", 1)

    over(endpoint, talk)


# What stays behind


def test_no_descriptor_and_no_zombie_is_left_by_sessions(endpoint: SshEndpoint, server: int) -> None:
    def descriptors() -> int:
        return len(os.listdir(f"/proc/{server}/fd"))

    def children() -> list[str]:
        text = Path(f"/proc/{server}/task/{server}/children").read_text()
        return text.split()

    before = descriptors()

    async def talk(connection: asyncssh.SSHClientConnection) -> None:
        for _ in range(10):
            await asyncio.gather(*(connection.run("echo x; exit 1", encoding=None) for _ in range(6)))
            await connection.run("tty", term_type="xterm")

    async def drop() -> None:
        connection = await connect(endpoint)
        for _ in range(5):
            process = await connection.create_process("echo here; exec cat", encoding=None)
            await process.stdout.readline()
        connection.abort()

    over(endpoint, talk)
    asyncio.run(drop())
    with socket.create_connection((endpoint.host, endpoint.port)) as half_open:
        half_open.recv(4)
    until(lambda: descriptors() <= before, f"back to {before} descriptors")
    until(lambda: children() == [], "no child, dead or alive")


def test_an_orphan_is_reaped_when_it_ends(endpoint: SshEndpoint, server: int) -> None:
    run(endpoint, "(setsid sh -c 'sleep 0.05' >/dev/null 2>&1 </dev/null &)")
    until(lambda: not Path(f"/proc/{server}/task/{server}/children").read_text().split(), "no zombie")


def test_an_idle_server_costs_next_to_nothing(endpoint: SshEndpoint, server: int) -> None:
    def cpu_s() -> float:
        fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    before = cpu_s()
    subprocess.run(["sleep", "2"], check=True)
    assert cpu_s() - before <= 0.03


def test_a_box_whose_files_vanish_ends_with_all_its_processes(tmp_path: Path) -> None:
    with embedded_server(tmp_path / "box", PUBLIC_KEY, box_id="vanishing") as endpoint:
        pids = []
        for prefix in ("setsid", "env -i", "setsid env -i"):
            script = f"({prefix} sh -c 'echo $$; exec sleep 600' 2>/dev/null </dev/null &) | head -1"
            pids.append(int(run(endpoint, script).stdout))
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        (tmp_path / "box" / "authorized_key").unlink()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "nothing of it is left")
