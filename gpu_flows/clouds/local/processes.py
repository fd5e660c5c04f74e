"""Processes of this machine by their identity, and the sweep that ends every process of a box."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_flows.clock import SYSTEM_CLOCK, Clock
from gpu_flows.clouds.local.layout import MARKER

_PROC = Path("/proc")
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process, told apart from a later one with the same number.

    Attributes:
        pid: Its number.
        started: Its start in clock ticks since boot (/proc/<pid>/stat, field 22).
        boot_id: The boot of the machine that it belongs to.
    """

    pid: int
    started: int
    boot_id: str

    @classmethod
    def own(cls) -> ProcessIdentity:
        """Return the identity of the calling process."""
        stat = _Stat.of(os.getpid())
        if stat is None:
            raise OSError("/proc does not know this process: is /proc mounted?")
        return cls(pid=os.getpid(), started=stat.started, boot_id=_boot_id())

    def is_alive(self) -> bool:
        """Tell whether the process still runs; a zombie does not."""
        stat = _Stat.of(self.pid)
        return (
            stat is not None
            and not stat.is_dead
            and stat.started == self.started
            and self.boot_id == _boot_id()
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ProcessIdentity:
        """Rebuild an identity from what `to_json` returned.

        Raises:
            ValueError: When the number could not be that of a process of ours.
        """
        identity = cls(pid=int(data["pid"]), started=int(data["started"]), boot_id=str(data["boot_id"]))
        if identity.pid <= 1:
            raise ValueError(f"{identity.pid} is no process of a box")
        return identity


@dataclass(frozen=True, slots=True)
class _Stat:
    """What is needed of /proc/<pid>/stat."""

    state: str
    parent: int
    started: int

    @property
    def is_dead(self) -> bool:
        return self.state in "ZXx"

    @classmethod
    def of(cls, pid: int) -> _Stat | None:
        try:
            text = (_PROC / str(pid) / "stat").read_text("utf-8", errors="replace")
        except OSError:  # it has ended meanwhile
            return None
        # The command name stands in parentheses and may hold anything, parentheses and spaces included.
        fields = text[text.rindex(")") + 2 :].split()
        return cls(state=fields[0], parent=int(fields[1]), started=int(fields[19]))


def _boot_id() -> str:
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:  # some sandboxes hide it
        return ""


def adopt_orphans() -> None:
    """Become the parent of all orphaned descendants, so that none of them leaves the tree below us.

    Where the kernel refuses, as in some sandboxes, they go to process 1 and are found by their marker alone.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def processes_of(box_id: str, server: ProcessIdentity | None = None) -> set[int]:
    """Return the pids of every living process that belongs to a box.

    A process belongs to it when it carries the box's marker in its environment, or descends from the box's
    server (which finds those that were started with another environment).

    Args:
        box_id: The box's id.
        server: The box's first process, where known.
    """
    living = {}
    for entry in os.listdir(_PROC):
        if entry.isdigit():
            stat = _Stat.of(int(entry))
            if stat is not None and not stat.is_dead:
                living[int(entry)] = stat
    marker = f"{MARKER}={box_id}".encode()
    found = {pid for pid in living if marker in _environment(pid)}
    if server is not None and server.is_alive():
        below: dict[int, list[int]] = {}
        for pid, stat in living.items():
            below.setdefault(stat.parent, []).append(pid)
        todo = [server.pid]
        while todo:
            pid = todo.pop()
            found.add(pid)
            todo += below.get(pid, ())
    return found


def _environment(pid: int) -> list[bytes]:
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or belongs to another user and so cannot be of one of our boxes
        return []


def end_processes(
    box_id: str,
    server: ProcessIdentity | None = None,
    *,
    grace_s: float = 1.0,
    timeout_s: float = 20.0,
    clock: Clock = SYSTEM_CLOCK,
) -> set[int]:
    """End every process of a box: TERM, a grace, then KILL until none is left.

    The server is stopped at once, so that it starts nothing more, and killed last, so that nothing gets out
    of the tree below it. The caller and process 1 are spared, whatever they carry.

    Args:
        box_id: The box's id; never empty.
        server: The box's first process, where known.
        grace_s: How long processes may take to end by themselves.
        timeout_s: How long to go on; a process in uninterruptible sleep cannot be killed.
        clock: Time and sleep.

    Returns:
        The pids that are still alive; empty when all are gone.
    """
    if not box_id:
        raise ValueError("an empty box id would match processes that belong to no box")
    spared = {0, 1, os.getpid()}
    begin = clock.monotonic()
    terminated: set[int] = set()
    passes_without = 0
    # Two empty passes: a process that forks behind the listing's back and ends is missed by one.
    while passes_without < 2:
        left = processes_of(box_id, server) - spared
        elapsed_s = clock.monotonic() - begin
        if not left:
            passes_without += 1
            continue
        passes_without = 0
        if elapsed_s > timeout_s:
            return left
        if server is not None and server.pid in left and server.is_alive():
            only_server = left == {server.pid}
            _signal(server.pid, signal.SIGKILL if only_server else signal.SIGSTOP)
            left.remove(server.pid)
        for pid in left:
            if elapsed_s >= grace_s:
                _signal(pid, signal.SIGKILL)
            elif pid not in terminated:
                _signal(pid, signal.SIGTERM)
        terminated |= left
        clock.sleep(0.01)
    return set()


def _signal(pid: int, number: signal.Signals) -> None:
    # Between the listing and this call the number may in principle pass to another process; numbers are
    # handed out in turn, so that takes a whole round of them within a few milliseconds. A process that has
    # become somebody else's (sudo) is not ours to signal; it is reported as alive in the end.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
