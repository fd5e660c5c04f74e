"""A process beside the owner that tears down when the owner dies, whatever kills it.

It runs in a session of its own and reads a pipe that only the owner holds open. "ok" disarms it; the end of
the pipe, or the owner's pid in the hands of another process, means that the owner is gone.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_flows.clouds.base import Cloud
from gpu_flows.errors import GpuFlowsError
from gpu_flows.leases.journal import Journal, process_start, this_process
from gpu_flows.leases.lease import Lease, Owner, lease_id

_DISARM = b"ok\n"
_OWNER_POLL_S = 2.0
_RETRY_S = 30.0


class Watchdog:
    """The owner's end of the pipe.

    Args:
        process: The watching process.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Process id of the watching process."""
        return self._process.pid

    def disarm(self, timeout_s: float = 10) -> None:
        """Tell it that everything is gone, and wait for its end; one that has ended already is fine."""
        pipe = self._process.stdin
        if pipe is not None and not pipe.closed:
            try:
                pipe.write(_DISARM)
                pipe.close()
            except BrokenPipeError:
                pass
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            # It has nothing left to do, so ending it loses nothing.
            self._process.kill()
            self._process.wait()


def start_watchdog(
    lease: Lease, *, clouds: Sequence[Mapping[str, Any]], journals: Path, log: Path, timeout_s: float = 600
) -> Watchdog:
    """Start a watchdog for a lease; it outlives this process and its session.

    Args:
        lease: What to tear down.
        clouds: How to open each cloud again, as the keyword arguments of `gpu_flows.clouds.open_cloud`. They
            may hold secrets and travel through the pipe alone, never in argv or a file.
        journals: Folder of this machine's journals.
        log: File that it writes to.
        timeout_s: How long one attempt of its teardown goes on trying.

    Returns:
        The handle by which the owner disarms it.
    """
    order = {
        "owner": list(lease.owner.parts),
        "namespace": lease.namespace,
        "may_hold": list(lease.clouds),
        "clouds": [dict(options) for options in clouds],
        "journals": str(journals),
        "timeout_s": timeout_s,
        "holder": this_process(detached=False),
    }
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "gpu_flows.leases.watchdog"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
    assert process.stdin is not None  # noqa: S101 - asked for above
    process.stdin.write(json.dumps(order).encode() + b"\n")
    process.stdin.flush()
    return Watchdog(process)


def owner_is_gone(
    descriptor: int,
    holder: Mapping[str, Any],
    *,
    wait: Callable[[int, float], bool] | None = None,
) -> bool:
    """Wait until the owner has disarmed us or is gone.

    Args:
        descriptor: The reading end of the pipe.
        holder: The owner's process, as `this_process` described it.
        wait: Waits for the descriptor, at most so many seconds; tells whether it can be read.

    Returns:
        True when the owner is gone, False when it has disarmed us.
    """
    wait = wait or _readable
    heard = b""
    while True:
        if wait(descriptor, _OWNER_POLL_S):
            chunk = os.read(descriptor, 4096)
            heard += chunk
            if heard.endswith(_DISARM):
                return False
            if not chunk:
                return True
        # A child that the owner forked may hold the pipe open long after the owner's death.
        elif process_start(holder["pid"]) != holder["started"]:
            return True


def main() -> int:
    """Read the order from the pipe, wait for the owner, and tear down if it is gone."""
    from gpu_flows.clouds import open_cloud

    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, 1)
        if not chunk:
            return 1  # The owner died before it had said what to watch: it had rented nothing yet.
        line += chunk
    order = json.loads(line)
    if not owner_is_gone(0, order["holder"]):
        return 0
    _say(f"the owner {order['owner']} is gone: tearing down")
    return _tear_down(order, [open_cloud(**options) for options in order["clouds"]])


def _tear_down(order: Mapping[str, Any], clouds: Sequence[Cloud], attempts: int = 20) -> int:
    from gpu_flows.leases.teardown import teardown

    owner = Owner(tuple(order["owner"]))
    journal = Journal(Path(order["journals"]), order["namespace"], lease_id(owner, order["namespace"]))
    for attempt in range(attempts):
        try:
            report = teardown(
                owner,
                order["namespace"],
                clouds,
                journal=journal,
                may_hold=order["may_hold"],
                timeout_s=order["timeout_s"],
            )
        except GpuFlowsError as error:
            _say(f"attempt {attempt + 1}: {error}")
            time.sleep(_RETRY_S)
        else:
            _say(f"ended {len(report.ended)} boxes, nothing is left")
            return 0
    return 1


def _readable(descriptor: int, timeout_s: float) -> bool:
    return bool(select.select([descriptor], [], [], timeout_s)[0])


def _say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} watchdog: {text}", flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
