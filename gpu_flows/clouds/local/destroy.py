"""How a local box ends its own billing: ``python -m gpu_flows.clouds.local.destroy ROOT ID``.

It runs inside the box, but without the box's marker and in a session of its own, so that it outlives the
processes that it ends, its caller among them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import sys
from pathlib import Path

from gpu_flows.clouds.local.layout import MARKER, python_command
from gpu_flows.errors import GpuFlowsError


def self_destruct_command(root: Path) -> str:
    """Return one line of POSIX sh by which a box ends itself; it fails where that did not work.

    Args:
        root: The registry's folder.
    """
    program = shlex.join(python_command("gpu_flows.clouds.local.destroy", str(root)))
    return f'( id=${MARKER}; unset {MARKER}; exec {program} "$id" )'


def main() -> int:
    """End one box."""
    from gpu_flows.clouds.local.registry import BOX_ID, Registry

    parser = argparse.ArgumentParser(prog="destroy", description="End one local box.")
    parser.add_argument("root", type=Path, help="folder of the registry")
    parser.add_argument("id", help="id of the box")
    arguments = parser.parse_args()
    if not BOX_ID.fullmatch(arguments.id):
        parser.error(f"{arguments.id!r} is no id of a box")
    with contextlib.suppress(PermissionError):  # the leader of a group already
        os.setsid()
    # Its caller is among those that it ends, and nobody is left to ask it to stop.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    try:
        Registry(arguments.root).end(arguments.id)
    except GpuFlowsError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
