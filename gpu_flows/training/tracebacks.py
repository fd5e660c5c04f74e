"""What the end of a rank's log says: its last traceback, and the marks of the usual causes.

Pure. Logs are whatever a script writes: progress bars, colours, bytes that are no text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpu_flows.training.causes import ExitCause

_START = "Traceback (most recent call last):"
_LAST_LINES = 40
_EXCERPT_LINES = 80

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
# torch prefixes the lines of a traceback when a group exists; Lightning and torchrun have the like.
_PREFIX = re.compile(r"^\[(?:rank\s*|default)\d+\]:? ?", re.M)
# An exception group indents itself and draws a tree of its members.
_GROUP = re.compile(r"^  [|+] ")
_BRANCH = re.compile(r"^\s+[|+]")
_EXCEPTION = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$")
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+)')
_BARE_ERROR = re.compile(r"^(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)(?:: .*)?$")
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


def _any(*alternatives: str) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{each})" for each in alternatives), re.M)


# First match wins.
_MARKS: tuple[tuple[ExitCause, re.Pattern[str]], ...] = (
    (ExitCause.DISK_FULL, _any(r"No space left on device", r"Errno 28\b", r"Disk quota exceeded")),
    (
        ExitCause.CUDA_OOM,
        _any(
            r"^(?:torch\.)?(?:cuda\.)?OutOfMemoryError",
            r"(?:CUDA|HIP) (?:error: )?out of memory",
            r"CUBLAS_STATUS_ALLOC_FAILED",
        ),
    ),
    (
        ExitCause.NCCL_TIMEOUT,
        _any(
            r"collective operation timeout",
            r"Timed out waiting \d+ms for (?:send|recv)",
            r"(?:NCCL|ProcessGroup)[^\n]*[Tt]im(?:ed |e)out",
        ),
    ),
    (
        ExitCause.HOST_OOM,
        _any(
            r"^(?:[\w.]+\.)?_?(?:Array)?MemoryError",
            r"Unable to allocate [\d.]+ [KMGT]iB",
            r"DefaultCPUAllocator: (?:can't allocate|not enough) memory",
            r"DataLoader worker [^\n]* killed by signal: Killed",
            r"Errno 12\b",
            r"std::bad_alloc",
            r"out of shared memory",
        ),
    ),
)
# A rank that lost its peer is a victim: its cause is elsewhere.
_LOST_PEER = _any(
    r"Connection (?:closed|reset) by peer",
    r"Socket closed",
    r"Broken pipe",
    r"ncclRemoteError",
    r"remote process exited",
    r"got 0 bytes\. Connection was likely closed",
    r"NCCL communicator was aborted",
)
_COLLECTIVE = _any(
    r"[Gg]loo", r"NCCL", r"ProcessGroup", r"Dist\w+Error", r"torch[/.]distributed", r"c10d", r"TCPStore"
)
_RENDEZVOUS = _any(
    r"Rendezvous\w*Error",
    r"DistNetworkError",
    r"DistStoreError",
    r"EADDRINUSE",
    r"waiting for clients\. \d+/\d+ clients joined",
    r"client socket has (?:timed out|failed to connect)",
)
_PORT_TAKEN = _any(r"EADDRINUSE", r"[Aa]ddress already in use")


@dataclass(frozen=True, slots=True)
class LogEnd:
    """What the end of a log says.

    Attributes:
        traceback: The last traceback with those that it grew from; empty without one.
        exception: Its last line: the exception and the first line of its message.
        place: ``train.py:12``: where it was raised, or the user's line that led there.
        cause: What its marks stand for; None when there is none.
        lost_peer: The rank failed because another one was gone.
        port_taken: A port was in use.
        last_line: The last line with anything on it.
    """

    traceback: str = ""
    exception: str = ""
    place: str = ""
    cause: ExitCause | None = None
    lost_peer: bool = False
    port_taken: bool = False
    last_line: str = ""


def read_log_end(tail: str) -> LogEnd:
    """Read the end of a log.

    Args:
        tail: The last part of the log; it may begin anywhere.
    """
    lines = _lines(tail)
    found = _last_traceback(lines)
    if found is None:
        said = lines[-_LAST_LINES:]
        exception = next((line for line in reversed(said) if _BARE_ERROR.match(line)), "")
        block: list[str] = []
    else:
        start, at = found
        end = next((i for i in range(at + 1, len(lines)) if not _BRANCH.match(lines[i])), len(lines))
        block = lines[start:end]
        exception = lines[at]
        # The rest of the message, and what a crashing runtime adds to it.
        said = lines[at : at + _LAST_LINES]
    text = "\n".join(said)
    # What a script raises because it lost its peer is a consequence, too.
    whole = "\n".join([*block, text])
    in_collective = bool(_COLLECTIVE.search(whole))
    lost_peer = in_collective and bool(_LOST_PEER.search(whole))
    cause = next((cause for cause, mark in _MARKS if mark.search(text)), None)
    if cause is None and not lost_peer and in_collective and _RENDEZVOUS.search(text):
        cause = ExitCause.RENDEZVOUS_FAILED
    return LogEnd(
        traceback="\n".join(_shortened(block)),
        exception=exception.strip(),
        place=_place(block),
        cause=cause,
        lost_peer=lost_peer and cause is None,
        port_taken=bool(_PORT_TAKEN.search(text)),
        last_line=next((line.strip() for line in reversed(lines) if line.strip()), ""),
    )


def _lines(tail: str) -> list[str]:
    plain = _PREFIX.sub("", _ANSI.sub("", tail.replace("\r\n", "\n")))
    # A progress bar rewrites its line; what counts is what it said last.
    return [_GROUP.sub("", line.rsplit("\r", 1)[-1]) for line in plain.rstrip("\r\n").split("\n")]


def _last_traceback(lines: list[str]) -> tuple[int, int] | None:
    """Return where the last traceback starts, with those it is chained to, and where its exception stands."""
    start = _index_before(lines, len(lines))
    if start is None:
        return None
    at = next((i for i in range(start + 1, len(lines)) if _EXCEPTION.match(lines[i])), None)
    if at is None:  # cut off while it was written
        return None
    while (link := _chain_before(lines, start)) is not None and (
        earlier := _index_before(lines, link)
    ) is not None:
        start = earlier
    return start, at


def _index_before(lines: list[str], end: int) -> int | None:
    return next((i for i in range(end - 1, -1, -1) if lines[i].strip().endswith(_START)), None)


def _chain_before(lines: list[str], start: int) -> int | None:
    """Return where the sentence stands that chains this traceback to the one before."""
    before = [i for i in range(max(0, start - 3), start) if lines[i].strip() in _CHAINED]
    return before[-1] if before else None


def _place(block: list[str]) -> str:
    """Return the innermost line of the user's own code: not of a library, nor of Python's."""
    frames = [(m["file"], m["line"]) for line in block if (m := _FRAME.match(line))]
    own = [f for f in frames if "site-packages" not in f[0] and "/lib/python" not in f[0] and f[0][:1] != "<"]
    if not (own or frames):
        return ""
    file, line = (own or frames)[-1]
    return f"{file.rsplit('/', 1)[-1]}:{line}"


def _shortened(block: list[str]) -> list[str]:
    if len(block) <= _EXCERPT_LINES:
        return block
    half = _EXCERPT_LINES // 2
    return [*block[:half], f"  ... {len(block) - 2 * half} lines ...", *block[-half:]]
