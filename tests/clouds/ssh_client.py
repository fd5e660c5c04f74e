"""A client of the tests' own, so that a box is judged by something that is not under test."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncssh

from gpu_flows.endpoint import SshEndpoint

KEY = asyncssh.generate_private_key("ssh-ed25519")
PUBLIC_KEY = KEY.export_public_key().decode().strip()


def connect(endpoint: SshEndpoint, **changes: Any) -> Any:
    """Connect to a box whose host key is known."""
    assert endpoint.host_key is not None
    options: dict[str, Any] = {
        "username": endpoint.username,
        "client_keys": [KEY],
        "known_hosts": ([asyncssh.import_public_key(endpoint.host_key)], [], []),
        "config": None,
        "agent_path": None,
    }
    return asyncssh.connect(endpoint.host, endpoint.port, **{**options, **changes})


def run(endpoint: SshEndpoint, command: str, stdin: bytes = b"") -> asyncssh.SSHCompletedProcess:
    """Run one command over a connection of its own."""

    async def main() -> asyncssh.SSHCompletedProcess:
        async with connect(endpoint) as connection:
            return await connection.run(command, input=stdin, encoding=None, timeout=60)

    return asyncio.run(main())
