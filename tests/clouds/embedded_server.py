"""An embedded SSH server for tests that need a box but no cloud."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpu_flows.clouds.local.processes import ProcessIdentity, end_processes
from gpu_flows.endpoint import SshEndpoint


@contextmanager
def embedded_server(
    root: Path, public_key: str, *, address: str = "127.0.0.1", box_id: str | None = None
) -> Iterator[SshEndpoint]:
    """Serve a box in a folder, and end it with every process that it started.

    Args:
        root: Folder of the box, made where needed; its ``home`` is the box's HOME.
        public_key: The key that may log in, one line in OpenSSH format.
        address: Loopback address to listen on.
        box_id: The id in the marker; unique among everything that runs on this machine.
    """
    root.mkdir(parents=True, exist_ok=True)
    (root / "endpoint.json").unlink(missing_ok=True)
    (root / "authorized_key").write_text(public_key)
    box_id = box_id or f"test-{root.stat().st_ino}-{time.time_ns():x}"
    command = [sys.executable, "-m", "gpu_flows.clouds.local.server", "--root", str(root)]
    server = subprocess.Popen([*command, "--address", address, "--id", box_id])
    try:
        deadline = time.monotonic() + 30
        while not (root / "endpoint.json").exists():
            assert server.poll() is None, f"the server ended with {server.returncode}"
            assert time.monotonic() < deadline, "the server did not come up"
            time.sleep(0.01)
        yield SshEndpoint.from_json(json.loads((root / "endpoint.json").read_text()))
    finally:
        identity = None
        if server.poll() is None and (root / "server.json").exists():
            identity = ProcessIdentity.from_json(json.loads((root / "server.json").read_text()))
        left = end_processes(box_id, identity)
        server.kill()
        server.wait(10)
        assert not left
