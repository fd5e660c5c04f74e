"""Jobs on a box that outlive the connection, run once however often they are asked for, and end wholly.

The protocol is POSIX sh in ``scripts/`` and lives in the job's folder on the box, ``~/.gpu-flows/jobs/<id>``.
A payload travels as a tar on stdin and is renamed into place, a recorder under setsid starts the job in a second
session and records how it ended. Nothing secret is ever an argument of a command.
"""

from __future__ import annotations

import io
import math
import re
import shlex
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from importlib import resources
from pathlib import PurePosixPath

from gpu_flows.errors import BadRequest
from gpu_flows.remote.errors import RemoteScriptFailed
from gpu_flows.remote.persist import persistently
from gpu_flows.remote.ssh import RemoteBox

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_OURS = frozenset({"GPU_FLOWS_JOB_ID", "GPU_FLOWS_JOB_DIR"})
# bash, where it is sh, refuses to assign these and ends the job before it began.
_READ_ONLY = frozenset({"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"})

_OWN_FILES = frozenset({"command", "log", ".state"})
_BLANK = b" " * 127 + b"\n"


class JobState(StrEnum):
    """Where a job is in its life, as far as its box can tell."""

    ABSENT = "ABSENT"
    """The box has never heard of it."""
    STAGED = "STAGED"
    """Its files are there and nothing has started it; asking for the start again does."""
    RUNNING = "RUNNING"
    EXITED = "EXITED"
    """It ended, and how is on record; everything that it had left running was ended too."""
    ORPHANED = "ORPHANED"
    """It runs, but its recorder was killed: it can be followed and killed, its exit will stay unknown."""
    LOST = "LOST"
    """It is dead and how it ended is unknown: a reboot, a restarted container, a killed recorder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """A job as its box describes it.

    Attributes:
        job_id: Its id.
        state: Where it is in its life.
        exit_code: Exit code once EXITED; 128 + n stands for signal n.
        why: ``exit``, ``signal``, ``oom`` (the kernel killed for want of memory meanwhile) or ``cancelled`` once
            EXITED; otherwise what is known about a state that is not plain, such as ``rebooted``.
        log_bytes: Size of its log; the size at the end once EXITED.
        pid: The job's own process id on the box; None before it started.
        started_at: When it started, aware, by the box's clock.
        ended_at: When its main process ended, by the box's clock.
        heartbeat_at: When its recorder was last seen alive, by the box's clock.
        box_time: The box's clock when it answered.
        free_kb: KiB left on the disk of the user's home.
    """

    job_id: str
    state: JobState
    exit_code: int | None = None
    why: str = ""
    log_bytes: int = 0
    pid: int | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    heartbeat_at: datetime | None = None
    box_time: datetime | None = None
    free_kb: int | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it will never run again, or never did."""
        return self.state in (JobState.EXITED, JobState.LOST, JobState.ABSENT)


async def start_job(
    box: RemoteBox,
    job_id: str,
    command: str,
    *,
    env: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
    files: Mapping[str, bytes] | None = None,
    timeout_s: float,
) -> JobStatus:
    """Start a job unless it has been started: however often this is asked for, also at once, it runs once.

    A lost connection is made again until the time is up. The first payload to arrive under an id is the one
    that runs. The job gets no terminal, runs in the login's home with its environment, and sees
    ``GPU_FLOWS_JOB_ID`` and ``GPU_FLOWS_JOB_DIR``.

    Args:
        box: Where to.
        job_id: Unique on the box: letters, digits, ``.``, ``_``, ``-``.
        command: POSIX sh text; it is saved as a file and never an argument.
        env: More environment; values arrive byte for byte.
        secrets: The same, in a file that is removed as soon as the job's shell has read it.
        files: Contents by relative path, put in the job's folder, readable by the user alone.
        timeout_s: For all of it.

    Returns:
        The job as it is a moment after its start; a short one may have ended.

    Raises:
        BadRequest: For an id, a name or a value that cannot be passed on.
        RemoteScriptFailed: When the box cannot take the job, for instance because its disk is full.
        SshError: When the box cannot be reached in time.
    """
    payload = _payload(command, env or {}, secrets or {}, files or {})
    text = script("start")
    checked_id(job_id)
    reply = await persistently(
        lambda left_s: box.script(text, job_id, stdin=payload, timeout_s=left_s), timeout_s=timeout_s
    )
    return _only(reply)


async def job_status(box: RemoteBox, job_id: str, *, timeout_s: float) -> JobStatus:
    """Return a job as it is; ABSENT when the box does not know it.

    Args:
        box: Where to ask.
        job_id: Its id.
        timeout_s: For all of it; a lost connection is made again meanwhile.

    Raises:
        SshError: When the box cannot be asked in time.
    """
    checked_id(job_id)
    reply = await persistently(
        lambda left_s: box.script(script("status"), job_id, timeout_s=left_s), timeout_s=timeout_s
    )
    return _only(reply)


async def list_jobs(box: RemoteBox, *, timeout_s: float) -> tuple[JobStatus, ...]:
    """Return every job that this box was ever given, by id: has one been started here?

    Args:
        box: Where to ask.
        timeout_s: For all of it; a lost connection is made again meanwhile.

    Raises:
        SshError: When the box cannot be asked in time.
    """
    reply = await persistently(
        lambda left_s: box.script(script("status"), timeout_s=left_s), timeout_s=timeout_s
    )
    return tuple(parse_status(line) for line in reply.decode().splitlines())


async def kill_job(box: RemoteBox, job_id: str, *, grace_s: float, timeout_s: float) -> int:
    """End a job to its last process: TERM, the grace, KILL, until none is left or the time is up.

    Reached are the job's session and group, whoever carries its marker in the environment (ranks of torchrun
    are sessions of their own), and all that descend from these.

    Args:
        box: Where it runs.
        job_id: Its id; one that the box does not know has nothing to kill.
        grace_s: Between TERM and KILL; rounded up to whole seconds.
        timeout_s: For all of it.

    Returns:
        How many processes are left; 0 unless some cannot be killed (a driver that hangs): then destroy the box.

    Raises:
        SshError: When the box cannot be reached in time.
    """
    checked_id(job_id)

    async def attempt(left_s: float) -> bytes:
        # Some of the time is for connecting, and for the recorder to write down the end.
        limit_s = max(1, math.floor(max(left_s - 12, left_s / 2)))
        grace = min(math.ceil(grace_s), max(0, limit_s - 2))  # KILL has to come within the limit
        return await box.script(script("kill"), job_id, str(grace), str(limit_s), timeout_s=left_s)

    reply = await persistently(attempt, timeout_s=timeout_s)
    return int(_fields(reply.decode().splitlines()[0])["left"])


def checked_id(job_id: str) -> str:
    """Return the id if it can name a folder.

    Raises:
        BadRequest: When it cannot.
    """
    if not _JOB_ID.fullmatch(job_id):
        raise BadRequest(
            f"{job_id!r} cannot be the id of a job",
            hint="up to 100 letters, digits, '.', '_' and '-', a letter or digit first",
        )
    return job_id


@cache
def script(name: str) -> str:
    """Return one of the package's scripts, with what they share in front."""
    folder = resources.files("gpu_flows.remote") / "scripts"
    return "\n".join((folder / f"{part}.sh").read_text("utf-8") for part in dict.fromkeys(("common", name)))


def parse_status(line: str) -> JobStatus:
    """Read one line of the box's description.

    Raises:
        RemoteScriptFailed: When it is none.
    """
    try:
        field = _fields(line)
        return JobStatus(
            job_id=field["id"],
            state=JobState(field["state"]),
            exit_code=_number(field["code"]),
            why=field["why"],
            log_bytes=_number(field["log_bytes"]) or 0,
            pid=_number(field["pid"]),
            started_at=_time(field["started_at"]),
            ended_at=_time(field["ended_at"]),
            heartbeat_at=_time(field["heartbeat_at"]),
            box_time=_time(field["box_time"]),
            free_kb=_number(field["free_kb"]),
        )
    except (KeyError, ValueError) as exc:
        raise RemoteScriptFailed(
            f"a box describes a job as {line!r}, which cannot be understood", exit_status=0, stderr=b""
        ) from exc


def _payload(
    command: str, env: Mapping[str, str], secrets: Mapping[str, str], files: Mapping[str, bytes]
) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:

        def add(name: str, content: bytes) -> None:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o600
            tar.addfile(entry, io.BytesIO(content))

        def add_folder(name: str) -> None:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o700
            tar.addfile(entry)

        add_folder(".state")
        for blank in ("runner", "pid", "cancelled", "exit"):
            add(f".state/{blank}.blank", _BLANK)
        add(".state/heartbeat", b"")
        add(".state/run.sh", script("run").encode())
        add(".state/job.sh", script("job").encode())
        add(".state/env", _assignments(env))
        add(".state/secrets", _assignments(secrets))
        add("command", _encoded("the command", command))
        add("log", b"")
        folders: set[PurePosixPath] = set()
        for name, content in files.items():
            path = _checked_file(name)
            for folder in reversed(path.parents[:-1]):
                if folder not in folders:
                    folders.add(folder)
                    add_folder(str(folder))
            add(str(path), content)
        add(".state/complete", b"")  # last: its presence says that nothing is missing
    return buffer.getvalue()


def _assignments(variables: Mapping[str, str]) -> bytes:
    lines = []
    for name, value in variables.items():
        if not _VARIABLE.fullmatch(name) or name in _OURS or name in _READ_ONLY:
            raise BadRequest(f"{name!r} cannot be set as an environment variable of a job")
        lines.append(name.encode() + b"=" + _encoded(f"the value of {name}", shlex.quote(value)) + b"\n")
    return b"".join(lines)


def _encoded(what: str, text: str) -> bytes:
    if "\0" in text:
        raise BadRequest(f"{what} holds a NUL character, which no environment and no shell can carry")
    return text.encode("utf-8", "surrogateescape")


def _checked_file(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if (
        not path.parts
        or "\0" in name
        or path.is_absolute()
        or ".." in path.parts
        or path.parts[0] in _OWN_FILES
    ):
        raise BadRequest(
            f"{name!r} cannot be a file in a job's folder",
            hint="a relative path that stays inside, and none of command, log, .state",
        )
    return path


def _fields(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split())


def _only(reply: bytes) -> JobStatus:
    return parse_status(reply.decode(errors="replace").strip())


def _number(text: str) -> int | None:
    return int(text) if text else None


def _time(text: str) -> datetime | None:
    return datetime.fromtimestamp(int(text), UTC) if text else None
