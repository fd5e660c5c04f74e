from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncssh
import pytest

from gpu_flows.endpoint import SshEndpoint
from tests.remote.boxes import write

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def descendants(pid: int) -> list[int]:
    """Return every process below one, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text()
                children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def processes_with(variable: str) -> list[int]:
    """Return every process whose environment holds ``NAME=value``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


@dataclasses.dataclass
class SshServer:
    """A server that a box would run: where it answers, who may log in, and its user's home."""

    endpoint: SshEndpoint
    private_key: str
    home: Path


class OpenSshServer(SshServer):
    """A real sshd on loopback, run by root, whose user root has a home of its own."""

    def __init__(
        self,
        folder: Path,
        private_key: str,
        public_key: str,
        options: dict[str, str],
        environment: dict[str, str],
    ) -> None:
        self.folder = folder
        self.options = options
        self.environment = environment
        self.marker = f"GPU_FLOWS_TEST_SSHD={os.getpid()}-{os.urandom(6).hex()}"
        self.process: subprocess.Popen[bytes] | None = None
        home = folder / "home"
        home.mkdir(mode=0o700)
        (folder / "authorized_keys").write_text(public_key + "\n")
        super().__init__(SshEndpoint("127.0.0.1", free_port(), "root"), private_key, home)
        self.new_host_key()

    def new_host_key(self, algorithm: str = "ssh-ed25519") -> str:
        key = asyncssh.generate_private_key(algorithm)
        path = self.folder / "host_key"
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        path.write_bytes(key.export_private_key("openssh"))
        return key.export_public_key("openssh").decode().strip()

    def start(self) -> None:
        os.makedirs("/run/sshd", exist_ok=True)
        settings = {
            "Port": str(self.endpoint.port),
            "ListenAddress": "127.0.0.1",
            "HostKey": str(self.folder / "host_key"),
            "AuthorizedKeysFile": str(self.folder / "authorized_keys"),
            "PidFile": "none",
            "StrictModes": "no",
            "UsePAM": "no",
            "PermitRootLogin": "yes",
            "PasswordAuthentication": "no",
            "AllowTcpForwarding": "yes",
            # root's home is in /etc/passwd; these two move it for the sessions of this server alone.
            "SetEnv": " ".join(
                [f"HOME={self.home}", self.marker, *(f"{k}={v}" for k, v in self.environment.items())]
            ),
            "ForceCommand": 'cd "$HOME" && exec "$SHELL" -c "$SSH_ORIGINAL_COMMAND"',
            **self.options,
        }
        config = self.folder / "sshd_config"
        config.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        log = (self.folder / "sshd.log").open("ab")
        self.process = subprocess.Popen(
            [str(SSHD), "-D", "-e", "-f", str(config)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        log.close()
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.endpoint.port), 1).close()
                return
            except OSError:
                assert self.process.poll() is None, (self.folder / "sshd.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.01)

    def stop(self) -> None:
        """End the server, its connections, and every process that a session left behind."""
        if self.process is None:
            return
        for pid in [*descendants(self.process.pid), self.process.pid, *processes_with(self.marker)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.process = None

    def connections(self) -> list[int]:
        """Return the sshd processes that serve connections, parents before children."""
        assert self.process is not None
        return [
            pid
            for pid in descendants(self.process.pid)
            if b"sshd" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]


class EmbeddedServer(SshServer):
    """The server of the local cloud, as a process of its own."""

    def __init__(self, folder: Path, private_key: str, public_key: str) -> None:
        (folder / "authorized_key").write_text(public_key + "\n")
        self.marker = f"GPU_FLOWS_BOX_ID={folder.name}-{os.getpid()}-{os.urandom(4).hex()}"
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "gpu_flows.clouds.local.server",
                "--root",
                str(folder),
                "--id",
                self.marker.partition("=")[2],
            ],
        )
        told = folder / "endpoint.json"
        deadline = time.monotonic() + 30
        while not told.exists():
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        where = json.loads(told.read_text())
        endpoint = SshEndpoint(where["host"], where["port"], where["username"])
        super().__init__(endpoint, private_key, folder / "home")

    def stop(self) -> None:
        for pid in [self.process.pid, *processes_with(self.marker)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="session")
def client_key() -> asyncssh.SSHKey:
    return asyncssh.generate_private_key("ssh-ed25519")


SshdMaker = Callable[..., OpenSshServer]


@contextlib.contextmanager
def sshd_maker(parent: Path, key: asyncssh.SSHKey) -> Iterator[SshdMaker]:
    if SSHD is None:
        pytest.skip("no OpenSSH server is installed")
    if os.geteuid() != 0:
        pytest.skip("sshd has to be run by root")
    servers: list[OpenSshServer] = []

    def make(environment: dict[str, str] | None = None, **options: str) -> OpenSshServer:
        folder = parent / f"sshd-{len(servers)}"
        folder.mkdir()
        server = OpenSshServer(folder, private_text(key), public_line(key), options, environment or {})
        servers.append(server)
        server.start()
        return server

    try:
        yield make
    finally:
        for server in servers:
            server.stop()


@contextlib.contextmanager
def embedded_server(parent: Path, key: asyncssh.SSHKey) -> Iterator[EmbeddedServer]:
    folder = parent / "embedded"
    folder.mkdir()
    server = EmbeddedServer(folder, private_text(key), public_line(key))
    try:
        yield server
    finally:
        server.stop()


def private_text(key: asyncssh.SSHKey) -> str:
    return key.export_private_key("openssh").decode()


def public_line(key: asyncssh.SSHKey) -> str:
    return key.export_public_key("openssh").decode().strip()


@pytest.fixture
def make_sshd(tmp_path: Path, client_key: asyncssh.SSHKey) -> Iterator[SshdMaker]:
    """Start real OpenSSH servers; keyword arguments go into their sshd_config."""
    with sshd_maker(tmp_path, client_key) as make:
        yield make


@pytest.fixture
def sshd(make_sshd: SshdMaker) -> OpenSshServer:
    """A real OpenSSH server on a free loopback port, for this test alone."""
    return make_sshd()


@pytest.fixture
def embedded(tmp_path: Path, client_key: asyncssh.SSHKey) -> Iterator[EmbeddedServer]:
    """The embedded server of the local cloud, for this test alone."""
    with embedded_server(tmp_path, client_key) as server:
        yield server


@pytest.fixture(scope="session")
def shared_sshd(tmp_path_factory: pytest.TempPathFactory, client_key: asyncssh.SSHKey) -> Iterator[SshServer]:
    with sshd_maker(tmp_path_factory.mktemp("shared"), client_key) as make:
        yield make()


@pytest.fixture(scope="session")
def shared_embedded(
    tmp_path_factory: pytest.TempPathFactory, client_key: asyncssh.SSHKey
) -> Iterator[SshServer]:
    with embedded_server(tmp_path_factory.mktemp("shared"), client_key) as server:
        yield server


@pytest.fixture(params=[pytest.param("sshd", marks=pytest.mark.sshd), "embedded"])
def server(request: pytest.FixtureRequest) -> SshServer:
    """Both servers, one after the other, each shared by all tests: the same code has to work with either."""
    found: SshServer = request.getfixturevalue(f"shared_{request.param}")
    return found


@pytest.fixture
def home(server, tmp_path):
    """A folder of this test's own in the home of a shared server."""
    folder = server.home / tmp_path.name
    folder.mkdir()
    return folder


@pytest.fixture
def code(tmp_path):
    folder = tmp_path / "my proj"
    write(folder, "train.py", "print('training')\n")
    write(folder, "pkg/__init__.py", "")
    write(folder, "pkg/größe 漢字.txt", "ümlaut")
    write(folder, "run.sh", "#!/bin/sh\necho run\n").chmod(0o755)
    write(folder, "conf/base.yaml", "lr: 1\n")
    (folder / "conf/current.yaml").symlink_to("base.yaml")
    (folder / "here").symlink_to("pkg")
    write(folder, "n" * 150 + "/" + "m" * 120 + ".txt", "long names")
    write(folder, "with\nnewline and \\backslash", "odd")
    write(folder, "-rf", "dash")
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a real server."""
    for item in items:
        if "make_sshd" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.sshd)
