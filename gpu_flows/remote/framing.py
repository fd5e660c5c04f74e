"""How a script travels to the box, and how its reply is told from noise.

`ssh host command` runs the user's login shell, which on Debian's bash sources ``.bashrc``: it may print, and
background children may keep writing. So every reply stands between two lines that carry a nonce. The text
itself and its arguments are quoted once, for the login shell; the script sees them byte for byte.
"""

from __future__ import annotations

import re
import secrets
import shlex
from dataclasses import dataclass

NAME = "gpu-flows"  # what the script sees as $0

COMMAND_LIMIT_BYTES = 96 * 1024
"""Linux refuses a single argument of 128 KiB or more; the login shell gets the whole command as one."""

# The text runs in a shell of its own, so that `exit`, `exec` and traps in it cannot skip the last line.
_FRAMED = r"""n=$1 t=$2; shift 2
printf '\n%s begin\n' "$n"; printf '\n%s begin\n' "$n" >&2
sh -c "$t" gpu-flows "$@"; s=$?
printf '\n%s end %s\n' "$n" "$s"
exit $s"""

_STREAMED = r"""printf '\n%s begin\n' "$1"; t=$2; shift 2; exec sh -c "$t" gpu-flows "$@" """


def new_nonce() -> str:
    """Return a word that no output contains by chance."""
    return f"gpu-flows-{secrets.token_hex(12)}"


def framed_command(nonce: str, text: str, args: tuple[str, ...]) -> str:
    """Return the command that runs a script between a begin and an end line."""
    return _command(_FRAMED, nonce, text, args)


def streamed_command(nonce: str, text: str, args: tuple[str, ...]) -> str:
    """Return the command that runs a script behind a begin line; what follows is all its own."""
    return _command(_STREAMED, nonce, text, args)


def begin_line(nonce: str) -> bytes:
    """Return the line after which the script's own output begins."""
    return f"\n{nonce} begin\n".encode()


def _command(wrapper: str, nonce: str, text: str, args: tuple[str, ...]) -> str:
    words = ["exec", "sh", "-c", wrapper, NAME, nonce, text, *args]
    if any("\0" in word for word in words):
        raise ValueError("a NUL byte cannot be passed to a command")
    command = shlex.join(words)
    if len(command.encode()) > COMMAND_LIMIT_BYTES:
        raise ValueError(
            f"a script of {len(command.encode())} bytes with its arguments; {COMMAND_LIMIT_BYTES} are the limit, "
            "so what is long has to travel on stdin"
        )
    return command


@dataclass(frozen=True, slots=True)
class Reply:
    """What stood between the two lines.

    Attributes:
        exit_status: Status that the script's own shell ended with; 128 + n after signal n.
        stdout: Exactly what the script wrote until it ended.
    """

    exit_status: int
    stdout: bytes


def find_reply(nonce: str, stdout: bytes) -> Reply | None:
    """Return the reply within what came back, or None while it is not complete."""
    start = stdout.find(begin_line(nonce))
    if start < 0:
        return None
    start += len(begin_line(nonce))
    end = re.compile(rb"\n" + nonce.encode() + rb" end (\d+)\n").search(stdout, start)
    return Reply(int(end[1]), stdout[start : end.start()]) if end else None


def after_begin(nonce: str, stderr: bytes) -> bytes:
    """Return what follows the begin line; all of it when there is none."""
    head, line, tail = stderr.partition(begin_line(nonce))
    return tail if line else head
