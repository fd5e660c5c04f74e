"""The dead-man: a process on every box that ends the box when its lease is over.

The hard deadline rides in the create call, so it holds even if nobody ever connects. Over SSH comes the
heartbeat: a box that nobody has renewed for so long ends itself before its deadline. What defeats it: a frozen
machine, root on the box who means to, a cloud whose API is down for good. Hence the other layers.
"""

from __future__ import annotations

import math
import re
import secrets
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from gpu_flows.errors import GpuFlowsError

if TYPE_CHECKING:
    from gpu_flows.remote.ssh import RemoteBox

FOLDER = ".gpu-flows/deadman"
"""Where it lives, in the home of the box's login user."""

HALT = "sudo -n shutdown -h now || shutdown -h now || poweroff -f || kill -TERM 1"
"""A last resort for a rented machine; never for one that is somebody's own."""

_END = "GPU_FLOWS_END"


class DeadmanError(GpuFlowsError):
    """The dead-man of a box does not run and cannot be started."""

    code = "DEADMAN"


class Found(StrEnum):
    """What a renewal found the dead-man to be."""

    RUNNING = "running"
    DEAD = "dead"
    STOPPED = "stopped"
    HUNG = "hung"
    """It runs, but has not counted for several ticks."""
    MISSING = "missing"
    """This box never had one: it cannot end its own billing."""


@dataclass(frozen=True, slots=True)
class Fired:
    """That a dead-man has fired; nothing takes that back.

    Attributes:
        why: ``deadline`` or ``silence``.
        at: When, aware, by the box's clock: the box was no longer wanted from here on.
    """

    why: str
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadmanState:
    """The dead-man of a box as a renewal left it.

    Attributes:
        found: What it was before; unless it was running it has been started again.
        left_s: Seconds until the hard deadline, by the box's uptime; None where there is no dead-man.
        silence_s: Seconds without a renewal that end the box; None when only the deadline does.
        silent_s: How long the silence was that this renewal broke.
        fired: That it has fired already.
    """

    found: Found
    left_s: int | None = None
    silence_s: int | None = None
    silent_s: int | None = None
    fired: Fired | None = None

    @property
    def rearmed(self) -> bool:
        """Whether it had to be started again."""
        return self.found not in (Found.RUNNING, Found.MISSING)


def boot_script(
    deadline: datetime,
    self_destruct: str,
    *,
    length_s: float,
    last_resort: str = "",
    tick_s: float = 10,
    retry_s: float = 30,
    attempt_s: int = 60,
) -> str:
    """Return POSIX sh that starts the dead-man, to be run by the login user at every boot.

    Running it again is harmless: one dead-man runs, and a lease that has begun goes on from where it was. It
    changes nothing of the shell around it, so it can stand among other lines.

    At the first boot the box's clock tells how much of the lease is left, but never more than its length; from
    then on the uptime counts, and after a reboot the wall clock may only shorten the rest. Setting the clock
    back or forth gains nothing.

    Args:
        deadline: When the box must end, aware.
        self_destruct: POSIX sh by which the box ends its own billing; it fails where that did not work, and is
            tried again until the box is gone. It may be started over SSH: what only PID 1 has in its
            environment has to be read from ``/proc/1/environ``.
        length_s: From the create to the deadline.
        last_resort: POSIX sh to run when two attempts did not end the box, such as `HALT`; by then the jobs
            have been killed.
        tick_s: Between two looks; the second look that finds the lease over fires.
        retry_s: Between two attempts.
        attempt_s: How long an attempt may take; then it is killed and counts as failed.

    Returns:
        Under 4,096 characters, which is what Vast.ai's onstart takes, if `self_destruct` leaves room.
    """
    if deadline.tzinfo is None:
        raise ValueError("the deadline needs a time zone")
    conf = f"{math.floor(deadline.timestamp())} {math.ceil(length_s)} {tick_s:g} {retry_s:g} {attempt_s}"
    lines = [
        "(",
        "umask 077",
        ': "${HOME:=/root}"',  # cloud-init sets none
        "export HOME",
        f'd=$HOME/{FOLDER} c="{conf}"',
        'mkdir -p "$d" && cd "$d" || exit',
        # Another lease's, on a home that outlived its box, says nothing about this one.
        'if [ "$(cat conf 2>&1)" != "$c" ]; then',
        "rm -f conf",
        "for f in pid left lease silence fired; do printf '%-127s\\n' '' >$f; done",
        f"cat >deadman.sh <<'{_END}'",
        _minified(_script("deadman")),
        _END,
        f"printf '%s\\n' {shlex.quote(self_destruct)} >destroy",
        f"printf '%s\\n' {shlex.quote(last_resort)} >halt",
        'echo "$c" >conf',
        "fi",
        "s=$(command -v setsid)",
        '$s sh deadman.sh "$d" </dev/null >/dev/null 2>&1 &',
        ")",
    ]
    return "\n".join(lines) + "\n"


async def arm_heartbeat(box: RemoteBox, *, silence_s: float, timeout_s: float) -> DeadmanState:
    """Let the box end itself after so many seconds without a renewal; this is the first one.

    Args:
        box: Whose dead-man.
        silence_s: Seconds, by the box's uptime; rounded up.
        timeout_s: For the call.

    Raises:
        DeadmanError: When the dead-man cannot be started.
        SshError: When the box cannot be reached in time.
    """
    return await _renew(box, str(max(1, math.ceil(silence_s))), timeout_s)


async def renew(box: RemoteBox, *, timeout_s: float) -> DeadmanState:
    """Break the silence; a dead-man that was killed, stopped or hangs is started again.

    Args:
        box: Whose dead-man.
        timeout_s: For the call.

    Returns:
        What was found; look at `DeadmanState.fired`, since a box that has fired cannot be kept.

    Raises:
        DeadmanError: When the dead-man cannot be started.
        SshError: When the box cannot be reached in time.
    """
    return await _renew(box, "", timeout_s)


async def disarm_heartbeat(box: RemoteBox, *, timeout_s: float) -> DeadmanState:
    """Leave the box its hard deadline alone, for an owner who goes away on purpose.

    Args:
        box: Whose dead-man.
        timeout_s: For the call.

    Raises:
        DeadmanError: When the dead-man cannot be started.
        SshError: When the box cannot be reached in time.
    """
    return await _renew(box, "0", timeout_s)


def parse_fired(text: str) -> Fired | None:
    """Read the record of a dead-man (`FOLDER` + ``/fired``); None while it has not fired."""
    words = text.split()
    return Fired(words[0], datetime.fromtimestamp(int(words[1]), UTC)) if len(words) >= 2 else None


async def _renew(box: RemoteBox, silence: str, timeout_s: float) -> DeadmanState:
    from gpu_flows.remote.persist import persistently

    nonce = secrets.token_hex(8)  # every renewal changes the content: a time stamp could be set back
    reply = await persistently(
        lambda left_s: box.script(_script("renew"), nonce, silence, timeout_s=left_s), timeout_s=timeout_s
    )
    field = dict(word.split("=", 1) for word in reply.decode().split())
    found = Found(field["was"])
    if found is Found.MISSING:
        return DeadmanState(found=found)
    if field["now"] != Found.RUNNING:
        raise DeadmanError(
            f"the dead-man of the box was {found} and is {field['now']} after it was started again, "
            "so only the other layers would end the box",
            hint="destroy the box",
        )
    return DeadmanState(
        found=found,
        left_s=int(field["left"]),
        silence_s=int(field["silence"] or 0) or None,
        silent_s=int(field["age"]),
        fired=parse_fired(f"{field['why']} {field['fired_at']}"),
    )


@cache
def _script(name: str) -> str:
    return (resources.files("gpu_flows.leases") / "scripts" / f"{name}.sh").read_text("utf-8")


def _minified(text: str) -> str:
    """Return a script without comments, indentation and empty lines."""
    lines = (re.sub(r"(^|\s+)# .*$|^#$", "", line).strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)
