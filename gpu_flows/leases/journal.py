"""What this machine remembers of a lease: one append-only file of JSON lines, synced line by line.

The journal is never a proof that a box exists or does not; the cloud is. It says where a create may have
been sent (so that teardown knows which clouds must answer), which creates are not settled yet, when boxes
ended (so that a bill does not grow afterwards), and which process answers for a lease.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from gpu_flows.clock import SYSTEM_CLOCK, Clock
from gpu_flows.clouds.base import Box
from gpu_flows.errors import GpuFlowsError

RESERVED, INTENT, CREATED, FAILED, DESTROYED, GONE = (
    "reserved",
    "intent",
    "created",
    "failed",
    "destroyed",
    "gone",
)


class JournalUnwritable(GpuFlowsError):
    """The journal could not be written; clouds that need it rent nothing."""

    code = "JOURNAL_UNWRITABLE"


class Journal:
    """The journal of one lease on this machine.

    Args:
        folder: Folder of the installation's journals.
        namespace: The installation.
        lease: The lease id.
        clock: Stamps the entries.
    """

    def __init__(self, folder: Path, namespace: str, lease: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self.path = folder / namespace / f"{lease}.jsonl"
        self._clock = clock

    def record(self, event: str, **fields: Any) -> None:
        """Append one entry and sync it.

        Args:
            event: What happened.
            **fields: Plain JSON values; never a secret.

        Raises:
            JournalUnwritable: When it could not be stored.
        """
        entry = {"at": self._clock.now().isoformat(), "event": event, **fields}
        # A leading newline seals a line that a killed writer left half-written.
        line = f"\n{json.dumps(entry, ensure_ascii=False, sort_keys=True)}\n".encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                written = os.write(descriptor, line)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise JournalUnwritable(
                f"the journal {self.path} cannot be written: {error.strerror}", hint="free some disk space"
            ) from error
        if written != len(line):
            raise JournalUnwritable(f"the journal {self.path} was written in part only: the disk is full")

    def entries(self) -> list[dict[str, Any]]:
        """Return every whole entry, oldest first; a half-written line is left out."""
        return list(_read(self.path))

    def clouds(self) -> set[str]:
        """Return every cloud (``cloud@account``) that the lease was reserved for or a create was sent to."""
        found: set[str] = set()
        for entry in self.entries():
            if entry["event"] == RESERVED:
                found.update(entry.get("clouds", ()))
            elif entry["event"] == INTENT:
                found.add(entry["cloud"])
        return found

    def unsettled(self) -> list[dict[str, Any]]:
        """Return the intents of which this machine does not know how they ended."""
        open_intents: dict[str, dict[str, Any]] = {}
        for entry in self.entries():
            if entry["event"] == INTENT:
                open_intents[entry["name"]] = entry
            elif entry["event"] in (CREATED, FAILED, GONE):
                open_intents.pop(entry.get("name", ""), None)
        return list(open_intents.values())

    def intents(self) -> list[dict[str, Any]]:
        """Return every create that this machine was about to send: ``at``, ``cloud``, ``name``."""
        return [entry for entry in self.entries() if entry["event"] == INTENT]

    def live_boxes(self) -> list[tuple[str, Box]]:
        """Return the boxes that were created and not proven gone, each with its ``cloud@account``."""
        live: dict[str, tuple[str, Box]] = {}
        for entry in self.entries():
            if entry["event"] == CREATED:
                live[entry["name"]] = (entry["cloud"], Box.from_json(entry["box"]))
            elif entry["event"] == GONE:
                live.pop(entry["name"], None)
        return list(live.values())

    def ended(self) -> dict[str, datetime]:
        """Return when each box was proven to be gone, by its name."""
        return {
            e["name"]: datetime.fromisoformat(e["ended_at"]) for e in self.entries() if e["event"] == GONE
        }

    def holder(self) -> dict[str, Any] | None:
        """Return the process that last answered for the lease: ``host``, ``pid``, ``started``, ``detached``."""
        return next((e["holder"] for e in reversed(self.entries()) if e["event"] == RESERVED), None)

    def owner(self) -> tuple[str, ...] | None:
        """Return the parts of the owner that reserved the lease on this machine."""
        return next((tuple(e["owner"]) for e in self.entries() if e["event"] == RESERVED), None)


def journals(folder: Path, namespace: str) -> list[Journal]:
    """Return the journals that this machine holds of an installation."""
    return [Journal(folder, namespace, path.stem) for path in sorted((folder / namespace).glob("*.jsonl"))]


def this_process(*, detached: bool) -> dict[str, Any]:
    """Return what tells this process from every other one, also after its pid was given away again."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": process_start(os.getpid()),
        "detached": detached,
    }


def process_start(pid: int) -> str | None:
    """Return the kernel's start time of a process that runs, or None when it does not run.

    A zombie does not run. Where there is no /proc the pid alone has to do, and the answer is "".
    """
    stat = Path(f"/proc/{pid}/stat")
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            return ""
        return ""
    try:
        # The command name may hold spaces and brackets: the fields start after its last bracket.
        fields = stat.read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def _read(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        if not line:
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "event" in entry:
            yield entry
