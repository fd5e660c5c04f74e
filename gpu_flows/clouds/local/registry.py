"""Every box of this machine, as folders: no daemon, no database, nothing that a kill can leave half done.

===================  ============================================================================
``staging/<id>/``    a box that is being made; it does not exist yet
``boxes/<id>/``      a box; it exists, and bills, from the rename onto this name
``trash/<id>/``      the files of a box that has ended, while they are being removed
``ended/<id>.json``  the record of a box that has ended; its modification time is when
===================  ============================================================================

Each step is one rename. The rename that makes a box is done by the box's own first process, so a box that
exists has, or had, a process that starts its dead-man, whenever its maker is killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

from gpu_flows.clock import SYSTEM_CLOCK, Clock
from gpu_flows.clouds.base import BoxState
from gpu_flows.clouds.errors import CapacityUnavailable, CloudError, CloudUnreachable, UnexpectedAnswer
from gpu_flows.clouds.local.files import read_json, remove_tree, write_atomically, write_json
from gpu_flows.clouds.local.layout import BoxFolder, box_environment, python_command
from gpu_flows.clouds.local.processes import ProcessIdentity, end_processes
from gpu_flows.endpoint import SshEndpoint

BOX_ID = re.compile(r"box-[0-9a-f]{12}")
_START_TIMEOUT_S = 60.0
_STALE_STAGING_S = 600.0
_ENDED_KEPT = 500
_LONGEST_END_S = 10.0
"""Ending a box takes no longer, so an older beginning has been given up."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRecord:
    """What the registry knows of a box; ``box.json``.

    Attributes:
        id: Its id.
        name: The name it carries.
        owner: Who answers for it.
        created_at: When it was made, ISO 8601.
        deadline: When it must be gone, ISO 8601.
        address: Its loopback address.
        usd_per_hour: Its price.
    """

    id: str
    name: str
    owner: str
    created_at: str
    deadline: str
    address: str
    usd_per_hour: float

    @classmethod
    def read(cls, path: Path) -> BoxRecord:
        """Read a record.

        Raises:
            FileNotFoundError: When there is none.
            UnexpectedAnswer: When it is not one.
        """
        try:
            data = json.loads(path.read_bytes())
            values = {f.name: data[f.name] for f in fields(cls)}
            for name, value in values.items():
                if not isinstance(value, (int, float) if name == "usd_per_hour" else str):
                    raise TypeError(f"{name} is {value!r}")
            datetime.fromisoformat(values["created_at"])
        except FileNotFoundError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UnexpectedAnswer(
                f"{path} is not the record of a box: {type(error).__name__}: {error}",
                hint=end_hint(path.parent),
            ) from error
        return cls(**values)


def new_box_id() -> str:
    """Return an id that no box has."""
    return f"box-{secrets.token_hex(6)}"


def end_hint(folder: Path) -> str:
    """Return how a person ends a box whose files cannot be understood."""
    command = ["python", "-m", "gpu_flows.clouds.local.destroy", str(folder.parent.parent), folder.name]
    return f"end the box with: {shlex.join(command)}"


def loopback_address(box_id: str) -> str:
    """Return the loopback address of a box: all of 127.0.0.0/8 is this machine, on Linux.

    Args:
        box_id: The box's id; the address follows from it.
    """
    first, second, third = bytes.fromhex(box_id.removeprefix("box-"))[:3]
    # Away from 127.0.0.x, where resolvers and other services of the machine listen.
    return f"127.{first % 254 + 1}.{second}.{third % 254 + 1}"


class Registry:
    """The boxes under one folder.

    Args:
        root: The folder; made when the first box is.
        clock: Time and sleep.
    """

    def __init__(self, root: Path, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.root = root
        self._clock = clock
        self._staging = root / "staging"
        self._boxes = root / "boxes"
        self._trash = root / "trash"
        self._ended = root / "ended"

    def create(
        self, record: BoxRecord, *, public_key: str, boot_script: str, environment: Mapping[str, str]
    ) -> None:
        """Make a box; it exists when this returns.

        Args:
            record: What it is.
            public_key: The key that may log in.
            boot_script: POSIX sh that it runs when it starts; empty for none.
            environment: More environment for its processes.

        Raises:
            CloudError: When it could not be made, with `ambiguous` and its id where it exists all the same.
        """
        try:
            self._make_folders()
            self._remove_leftovers()
            staged = BoxFolder(self._staging / record.id)
            staged.path.mkdir(mode=0o700)
            try:
                write_json(staged.record, asdict(record))
                write_json(staged.environment, dict(environment))
                write_atomically(staged.authorized_key, public_key.strip() + "\n")
                if boot_script:
                    write_atomically(staged.boot_script, boot_script, mode=0o700)
                self._start(staged, record)
            except BaseException:
                shutil.rmtree(staged.path, ignore_errors=True)
                raise
        except OSError as error:
            raise CapacityUnavailable(
                f"this machine cannot make a box under {self.root}: {error.strerror or error}",
                hint="free some disk space or processes, or set GPU_FLOWS_HOME to another folder",
            ) from error

    def _start(self, staged: BoxFolder, record: BoxRecord) -> None:
        """Start the process that is the box; it renames the folder and goes into the background."""
        final = self._boxes / record.id
        command = python_command("gpu_flows.clouds.local.server", "--detach")
        command += ["--root", str(staged.path), "--become", str(final)]
        command += ["--id", record.id, "--address", record.address]
        try:
            started = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=box_environment(staged, record.id),
                cwd="/",
                timeout=_START_TIMEOUT_S,
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise CloudUnreachable(
                f"the first process of the box did not start within {_START_TIMEOUT_S:.0f} s",
                box_ids=(record.id,),
            ) from error
        if started.returncode != 0:
            lines = started.stderr.decode("utf-8", errors="replace").strip().splitlines()
            exists = final.exists()
            raise CloudError(
                f"the first process of the box ended with {started.returncode}: {lines[-1] if lines else ''}",
                ambiguous=exists,
                box_ids=(record.id,) if exists else (),
                answer="\n".join(lines[-20:]),
            )

    def records(self) -> list[BoxRecord]:
        """Return every box that exists.

        Raises:
            UnexpectedAnswer: When anything there is not a box: what cannot be understood may be one.
        """
        try:
            names = sorted(os.listdir(self._boxes))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UnexpectedAnswer(
                f"the boxes of {self._boxes} cannot be listed: {error.strerror}"
            ) from error
        found = (self.record(name) for name in names)
        return [record for record in found if record is not None]

    def record(self, box_id: str) -> BoxRecord | None:
        """Return a box that exists, or None.

        Raises:
            UnexpectedAnswer: When something else has its place.
        """
        folder = BoxFolder(self._boxes / box_id)
        if not BOX_ID.fullmatch(box_id):
            raise UnexpectedAnswer(
                f"{folder.path} is not a box: nothing else may lie there", hint="move it elsewhere"
            )
        try:
            record = BoxRecord.read(folder.record)
        except FileNotFoundError as error:
            if not folder.path.exists():
                return None
            raise UnexpectedAnswer(
                f"{folder.path} has no record of its box", hint=end_hint(folder.path)
            ) from error
        if record.id != box_id:
            raise UnexpectedAnswer(f"{folder.record} is the record of another box, {record.id}")
        return record

    def ended_at(self, box_id: str) -> datetime | None:
        """Return when a box ended; None for one that nobody remembers."""
        for path in (self._ended / f"{box_id}.json", BoxFolder(self._trash / box_id).record):
            with contextlib.suppress(FileNotFoundError):
                return datetime.fromtimestamp(path.stat().st_mtime, UTC)
        return None

    def state(self, box_id: str) -> tuple[BoxState, str, SshEndpoint | None]:
        """Return the state of a box that exists, the reason for it, and where it answers.

        Args:
            box_id: Its id.

        Raises:
            UnexpectedAnswer: When its files cannot be understood.
        """
        folder = BoxFolder(self._boxes / box_id)
        if folder.ending.exists():
            return BoxState.ENDING, "", None
        try:
            server = ProcessIdentity.from_json(read_json(folder.server))
            endpoint = SshEndpoint.from_json(read_json(folder.endpoint)) if folder.endpoint.exists() else None
        except FileNotFoundError as error:
            if not folder.path.exists():
                return BoxState.GONE, "", None
            return BoxState.FAILED, f"{error.filename} is missing", None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UnexpectedAnswer(
                f"the files in {folder.path} are not those of a box: {type(error).__name__}: {error}",
                hint=end_hint(folder.path),
            ) from error
        if not server.is_alive():
            return BoxState.FAILED, f"its process {server.pid} has ended; see {folder.server_log}", None
        return (BoxState.RUNNING if endpoint else BoxState.STARTING), "", endpoint

    def finish_ends(self) -> None:
        """End what somebody began to end and did not: whoever destroyed it was killed half-way.

        The box's own dead-man may be among what had been killed by then, so whoever looks next goes on.
        """
        for record in self.records():
            with contextlib.suppress(FileNotFoundError):
                begun = BoxFolder(self._boxes / record.id).ending.stat().st_mtime
                if self._clock.now().timestamp() - begun > _LONGEST_END_S:
                    self.end(record.id)

    def end(self, box_id: str) -> None:
        """End a box: every process of it, its files, and with them its billing.

        Safe at any moment of its life, from several processes at once, and from inside the box by a
        process that does not carry its marker. A box that does not exist is fine.

        Args:
            box_id: Its id.

        Raises:
            CloudError: When a process of it cannot be ended; it goes on existing.
        """
        folder = BoxFolder(self._boxes / box_id)
        if not folder.path.exists():
            return
        _mark(folder.ending)
        left = end_processes(box_id, _server_of(folder), clock=self._clock)
        if left:
            raise CloudError(
                f"processes {', '.join(map(str, sorted(left)))} of the box {box_id} cannot be killed, so it goes on",
                hint="they wait for the kernel, as on a dead network disk; repeat the teardown later",
            )
        try:
            # The end rides on the record's own time: writing a file could fail on a full disk.
            if folder.record.exists():
                now = self._clock.now().timestamp()
                os.utime(folder.record, (now, now))
            self._trash.mkdir(mode=0o700, exist_ok=True)
            folder.path.rename(self._trash / box_id)
        except FileNotFoundError:
            return  # somebody else has ended it meanwhile
        except OSError as error:
            raise CloudError(
                f"the box {box_id} cannot be taken from {self._boxes}: {error.strerror}"
            ) from error
        self._bury(box_id)

    def _bury(self, box_id: str) -> None:
        """Keep the record of a box that has ended, and remove its files."""
        folder = BoxFolder(self._trash / box_id)
        try:
            self._ended.mkdir(mode=0o700, exist_ok=True)
            if folder.record.exists():
                folder.record.rename(self._ended / f"{box_id}.json")
            remove_tree(folder.path)
            self._forget_oldest()
        except FileNotFoundError:
            return  # somebody else is at it
        except OSError as error:
            # The box itself is gone, so this is no failure of its end; the next create tries again.
            _log.warning("files of the ended box %s remain in %s: %s", box_id, folder.path, error)

    def _forget_oldest(self) -> None:
        names = os.listdir(self._ended)
        # Not at each end: that would read 500 times for every box.
        if len(names) > _ENDED_KEPT * 1.2:
            paths = sorted((self._ended / name for name in names), key=_modified)
            for path in paths[:-_ENDED_KEPT]:
                path.unlink(missing_ok=True)

    def _make_folders(self) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (self._staging, self._boxes, self._trash, self._ended):
            path.mkdir(mode=0o700, exist_ok=True)

    def _remove_leftovers(self) -> None:
        """Remove what makers and enders that were killed have left."""
        for name in filter(BOX_ID.fullmatch, os.listdir(self._trash)):
            self._bury(name)
        for name in filter(BOX_ID.fullmatch, os.listdir(self._staging)):
            path = self._staging / name
            # By the clock that gives files their times.
            if time.time() - _modified(path) > _STALE_STAGING_S:
                end_processes(name, clock=self._clock)
                shutil.rmtree(path, ignore_errors=True)


def _server_of(folder: BoxFolder) -> ProcessIdentity | None:
    try:
        return ProcessIdentity.from_json(read_json(folder.server))
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("the first process of the box in %s is not known: %s", folder.path, error)
        return None


def _mark(path: Path) -> None:
    try:
        path.touch(mode=0o600)
    except OSError as error:
        # Only for those who look on: a box has to end on a full disk too.
        _log.debug("the box cannot be marked as ending: %s", error)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return time.time()
