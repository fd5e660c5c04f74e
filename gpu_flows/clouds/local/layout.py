"""What lies where in the folder of one box, and the environment in which its processes run.

A box's folder:

==================  ====  ==========================================================================
``box.json``              the record of the registry; absent for a server that a test starts by hand
``authorized_key``        the one public key that may log in; the box ends when this file goes away
``boot.sh``               POSIX sh that runs once, when the box starts; optional
``environment.json``      more environment for the box's processes; optional
``server.json``           identity of the server's process, written before the box exists
``host_key``        0600  the server's own key
``endpoint.json``         where the server answers, written when it does
``ending``                present once the box is being destroyed
``server.log``, ``boot.log``
``home/``, ``tmp/``       what the box's processes see as HOME and TMPDIR
==================  ====  ==========================================================================
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

MARKER = "GPU_FLOWS_BOX_ID"
"""Every process of a box carries this variable, so that the last of them can be found in /proc."""

USERNAME = "box"
"""The login name that endpoints carry; the server itself maps every name to the same home."""


class BoxFolder:
    """The files of one box.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record = path / "box.json"
        self.authorized_key = path / "authorized_key"
        self.boot_script = path / "boot.sh"
        self.boot_log = path / "boot.log"
        self.environment = path / "environment.json"
        self.server = path / "server.json"
        self.server_log = path / "server.log"
        self.host_key = path / "host_key"
        self.endpoint = path / "endpoint.json"
        self.ending = path / "ending"
        self.home = path / "home"
        self.tmp = path / "tmp"


def box_environment(folder: BoxFolder, box_id: str) -> dict[str, str]:
    """Return the whole environment of a box's processes.

    Nothing of the caller's own environment gets in: it may hold the keys of other clouds.

    Args:
        folder: The box's folder.
        box_id: The box's id.
    """
    extra = json.loads(folder.environment.read_text("utf-8")) if folder.environment.exists() else {}
    # The interpreter's own folder comes first, so that `python` and `torchrun` on the box are those of the
    # environment that gpu-flows runs in.
    programs = os.path.dirname(sys.executable)
    return {
        "PATH": f"{programs}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        "SHELL": "/bin/sh",
        "USER": USERNAME,
        "LOGNAME": USERNAME,
        **extra,
        "HOME": str(folder.home),
        "TMPDIR": str(folder.tmp),
        MARKER: box_id,
    }


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module of this very package, wherever it is imported from.

    Args:
        module: Its dotted name.
        *arguments: What it is called with.
    """
    source = Path(__file__).resolve().parents[3]
    # Appended, and with -P nothing is put in front: a folder of packages must not hide the standard library.
    start = (
        "import runpy, sys; sys.path.append(sys.argv.pop(1)); "
        'runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)'
    )
    return [sys.executable, "-P", "-c", start, str(source), module, *arguments]
