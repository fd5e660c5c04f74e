"""What an instance has around its boxes: the programs of its root, each a stand-in that touches no real machine."""

from __future__ import annotations

from pathlib import Path

_PROGRAMS = {
    # The hypervisor learns of the halt, as it does of a real one.
    "shutdown": 'exec curl -fsS -m 20 -X POST "$EC2_HYPERVISOR"',
    "poweroff": 'exec curl -fsS -m 20 -X POST "$EC2_HYPERVISOR"',
    "sudo": '[ "$1" != -n ] || shift; exec "$@"',
    "getent": 'echo "$2:x:1000:1000::$HOME:/bin/sh"',
    "runuser": 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"',
    "nvidia-smi": 'printf %s "$CARDS"',
    "systemd-run": """
        after=0
        while :; do
          case $1 in
            --on-active=*) after=${1#*=} ;;
            --*) ;;
            *) break ;;
          esac
          shift
        done
        echo "$after $*" >>"$HOME/systemd-run.log"
        (sleep "$after"; exec "$@") </dev/null >/dev/null 2>&1 &
    """,
}


def stand_ins(folder: Path) -> Path:
    """Write the programs into a folder, which then comes first in the PATH of every process of a box.

    A box is a process of the machine that runs the tests, perhaps as root: without them ``shutdown`` would
    be that machine's own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in _PROGRAMS.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    return folder
