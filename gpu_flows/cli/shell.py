"""``ssh``: a shell on a box, by the system's own client, with the key of the lease and the pinned host key."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_flows.cli.flags import OWNER, WHERE
from gpu_flows.cli.output import Output
from gpu_flows.cli.session import clouds_of, installation, owner_named
from gpu_flows.cli.verbs import Flag, Given, verb
from gpu_flows.errors import BadRequest

if TYPE_CHECKING:
    from gpu_flows.endpoint import SshEndpoint

_REACH_TIMEOUT_S = 60.0


@verb(
    [OWNER, *WHERE, Flag("node", int, "Which of its boxes. Default 0.", metavar="N")],
    rest="COMMAND",
)
def ssh(given: Given, output: Output) -> int:
    """Open a shell on a box, or run a command there; the exit code is that of ssh.

    One word behind -- is a line for the remote shell, several are a command and its arguments. The user's own
    ssh configuration and known_hosts are neither read nor written.
    """
    from gpu_flows.runs.lookup import find_lease

    client = shutil.which("ssh")
    if client is None:
        raise BadRequest(
            "there is no ssh client on this machine", hint="install OpenSSH's, then call this again"
        )
    owner = owner_named(given.get("owner"))
    with installation(output) as here:
        output.screen.waiting("looking for the box")
        lease = find_lease(owner, here, clouds=clouds_of(given), inspects=False, timeout_s=_REACH_TIMEOUT_S)
        number = given.get("node", 0)
        if not 0 <= number < len(lease.boxes):
            raise BadRequest(f"there is no node {number}: there are nodes 0 to {len(lease.boxes) - 1}")
        box = lease.boxes[number].box
        remote = here.remote(box, lease.namespace)
        cloud = here.cloud(box.ref)
        identity = here.identity(cloud, lease.namespace)
        output.close()
        with tempfile.TemporaryDirectory(prefix="gpu-flows-ssh-") as folder:
            command = ssh_command(
                client, remote.endpoint, identity.private_key, Path(folder), given.get("rest", ())
            )
            return _run(command)


def ssh_command(
    client: str, endpoint: SshEndpoint, private_key: str, folder: Path, words: Sequence[str]
) -> list[str]:
    """Write what the client needs into a folder, and return its command line.

    Args:
        client: Path of the client.
        endpoint: Where the box answers, with its pinned host key.
        private_key: The key that opens it.
        folder: Readable by the user alone; removed afterwards.
        words: What is to be run; empty for a shell.
    """
    key, known_hosts = folder / "key", folder / "known_hosts"
    descriptor = os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(private_key)
    hosts = [endpoint] if endpoint.proxy is None else [endpoint, endpoint.proxy]
    lines = [f"[{each.host}]:{each.port} {each.host_key}\n" for each in hosts if each.host_key]
    lines += [f"{each.host} {each.host_key}\n" for each in hosts if each.host_key and each.port == 22]
    known_hosts.write_text("".join(lines), encoding="utf-8")
    options = [
        *("-F", os.devnull, "-i", str(key)),
        *("-o", "IdentitiesOnly=yes", "-o", "IdentityAgent=none", "-o", "BatchMode=yes"),
        *("-o", f"UserKnownHostsFile={known_hosts}", "-o", f"GlobalKnownHostsFile={os.devnull}"),
        *("-o", "StrictHostKeyChecking=yes", "-o", "LogLevel=ERROR", "-o", "ServerAliveInterval=15"),
    ]
    jump = []
    if endpoint.proxy is not None:
        through = [client, *options, "-W", "%h:%p", "-p", str(endpoint.proxy.port)]
        jump = [
            "-o",
            f"ProxyCommand={shlex.join([*through, f'{endpoint.proxy.username}@{endpoint.proxy.host}'])}",
        ]
    line = words[0] if len(words) == 1 else shlex.join(words)
    target = ["-p", str(endpoint.port), f"{endpoint.username}@{endpoint.host}"]
    return [client, *options, *jump, *target, *(["--", line] if words else [])]


def _run(command: Sequence[str]) -> int:
    """Run the client in the foreground; Ctrl-C is for what runs on the box, not for us."""
    before = signal.signal(signal.SIGINT, lambda _number, _frame: None)
    try:
        return subprocess.run(command, check=False).returncode
    finally:
        signal.signal(signal.SIGINT, before)


COMMANDS = {"ssh": ssh}
