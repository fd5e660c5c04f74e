"""Outputs come back from a box: globs looked up there, one tar stream, nothing written that was not asked for."""

from __future__ import annotations

import asyncio
import os
import posixpath
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from gpu_flows.remote.archive import Unpacked, Unpacker
from gpu_flows.remote.errors import RemoteScriptFailed, SshUnreachable
from gpu_flows.remote.globs import Pattern, resolve_pattern
from gpu_flows.remote.persist import persistently
from gpu_flows.remote.ssh import RemoteBox
from gpu_flows.remote.tree import is_within

_PATIENCE_S = 120.0
_SPARE_BYTES = 256 << 20
"""Left free on the disk here, whatever a box sends."""
_OWN_FOLDER = ".gpu-flows"
"""In the home: jobs, with their secrets. No pattern of the home reaches into it."""

# $1 the job's working directory. Replies: home and working directory, absolute.
_WHERE = r"""
case $1 in
"~") cwd=$HOME ;;
"~/"*) cwd=$HOME/${1#"~/"} ;;
/*) cwd=$1 ;;
*) cwd=$HOME/$1 ;;
esac
printf '%s\0%s\0' "$HOME" "$cwd"
"""

# $@ files and folders. Replies: every regular file below them, and every link that leads to one. Folders that are
# links are followed only where a pattern names them.
_LIST = r"""
for start; do
    if [ -d "$start" ]; then start=$start/; fi
    find "$start" -type f -print0 2>/dev/null
    find "$start" -type l -exec sh -c 'for l; do if [ -f "$l" ]; then printf "%s\0" "$l"; fi; done' sh {} + \
        2>/dev/null
done
:
"""

# stdin: names, relative to the root. Links are sent as what they lead to.
_SEND = r"""cd / && exec xargs -0 tar -chf -"""


@dataclass(frozen=True, slots=True)
class FetchedFile:
    """A file that was fetched.

    Attributes:
        name: Below the destination, with slashes.
        path: Where it is now.
        remote_path: Where it is on the box, absolute.
        size_bytes: Its size.
        sha256: Of its content as it arrived.
    """

    name: str
    path: Path
    remote_path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Fetched:
    """What became of a list of patterns.

    Attributes:
        files: What is here now, sorted by name.
        unmatched: Patterns that no file matches.
        outside: Patterns that lead out of the working directory and the home, so nothing was fetched for them.
        failed: Files that matched and did not arrive, such as those deleted meanwhile.
        total_bytes: Of all files.
        complaint: What the box said about files that vanished or changed while they were sent.
    """

    files: tuple[FetchedFile, ...]
    unmatched: tuple[str, ...]
    outside: tuple[str, ...]
    total_bytes: int
    failed: tuple[str, ...] = ()
    complaint: str = ""


async def fetch(
    box: RemoteBox,
    patterns: Sequence[str],
    destination: Path,
    *,
    cwd: str,
    progress: Callable[[int, int], None] | None = None,
    max_bytes: int | None = None,
    patience_s: float = _PATIENCE_S,
    timeout_s: float,
) -> Fetched:
    """Fetch the files that patterns match: ``runs/**``, ``*.json``, ``~/ckpt/*``, an absolute path.

    ``*`` and ``?`` stay within a name and match hidden ones too, ``**`` is any number of folders, and a folder that
    matches comes with all that is below it. A relative pattern has to stay in the working directory, others in it
    or in the home. Files keep their path relative to the working directory, else to the home; where both would
    have the same name, the home's goes below ``home/``.

    A connection that is lost is made again, and what has arrived is not sent twice.

    Args:
        box: The box.
        patterns: What is wanted.
        destination: Folder here; made if missing. Files of the same name are replaced, each when it is whole.
        cwd: The job's working directory; relative to the home unless absolute.
        progress: Hears the number of files that have arrived and of all.
        max_bytes: Most to fetch; by default what the disk here has room for.
        patience_s: How long to try to reach a box that was lost meanwhile.
        timeout_s: For all of it.

    Raises:
        UnwantedArchive: When the box sends something else; nothing of that is written.
        FetchTooLarge: When there is no room.
        CannotWrite: When something here is in the way.
        SshError: When the box cannot be reached.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    destination = destination.expanduser().resolve()
    home, there = await _where(box, cwd, _left(deadline, patience_s))
    resolved = {text: resolve_pattern(text, cwd=there, home=home) for text in patterns}
    inside = [pattern for pattern in resolved.values() if pattern is not None]
    paths = await _list(box, inside, _left(deadline, patience_s)) if inside else []
    matched = {pattern.text: _matching(pattern, paths, home) for pattern in inside}
    names = _local_names({path for found in matched.values() for path in found}, cwd=there, home=home)

    await asyncio.to_thread(destination.mkdir, parents=True, exist_ok=True)
    if max_bytes is None:
        max_bytes = max(0, shutil.disk_usage(destination).free - _SPARE_BYTES)
    files: dict[str, FetchedFile] = {}
    complaint = ""
    wanted = dict(names)
    while wanted:
        room = max_bytes - sum(file.size_bytes for file in files.values())
        try:
            complaint = await _receive(box, wanted, destination, files, room, progress, _left(deadline))
            break
        except SshUnreachable:
            if asyncio.get_running_loop().time() >= deadline:
                raise
            wanted = {path: name for path, name in names.items() if path not in files}
            await persistently(
                lambda left_s: box.script(":", timeout_s=left_s), timeout_s=_left(deadline, patience_s)
            )
    return Fetched(
        files=tuple(sorted(files.values(), key=lambda file: file.name)),
        unmatched=tuple(text for text, found in matched.items() if not found),
        outside=tuple(text for text, pattern in resolved.items() if pattern is None),
        total_bytes=sum(file.size_bytes for file in files.values()),
        failed=tuple(sorted(path for path in names if path not in files)),
        complaint=complaint,
    )


async def _where(box: RemoteBox, cwd: str, timeout_s: float) -> tuple[str, str]:
    reply = await persistently(lambda left_s: box.script(_WHERE, cwd, timeout_s=left_s), timeout_s=timeout_s)
    home, there, _ = reply.split(b"\0")
    return posixpath.normpath(os.fsdecode(home)), posixpath.normpath(os.fsdecode(there))


async def _list(box: RemoteBox, patterns: Iterable[Pattern], timeout_s: float) -> list[str]:
    """Return the absolute paths of every file below the places where the patterns begin."""
    starts = sorted({pattern.start for pattern in patterns})
    reply = await persistently(
        lambda left_s: box.script(_LIST, *starts, timeout_s=left_s), timeout_s=timeout_s
    )
    paths = {os.fsdecode(path).replace("//", "/") for path in reply.split(b"\0") if path}
    return sorted(path for path in paths if path.startswith("/") and is_within(path[1:]))


def _matching(pattern: Pattern, paths: Iterable[str], home: str) -> list[str]:
    own = "" if pattern.base != home else f"{_OWN_FOLDER}/"
    base = pattern.base.rstrip("/") + "/"
    below = (path[len(base) :] for path in paths if path.startswith(base))
    return [
        base + rest
        for rest in below
        if pattern.matches(rest) and not (own and rest.startswith(own)) and "/.gpu-flows-" not in f"/{rest}"
    ]


def _local_names(paths: Iterable[str], *, cwd: str, home: str) -> dict[str, str]:
    """Return where each file goes, relative to the destination."""
    inner = cwd.rstrip("/") + "/"
    names = {path: path[len(inner) :] for path in paths if path.startswith(inner)}
    taken = set(names.values())
    for path in set(paths) - set(names):
        name = posixpath.relpath(path, home)
        names[path] = f"home/{name}" if name in taken else name
    return names


async def _receive(
    box: RemoteBox,
    wanted: Mapping[str, str],
    destination: Path,
    files: dict[str, FetchedFile],
    room_bytes: int,
    progress: Callable[[int, int], None] | None,
    timeout_s: float,
) -> str:
    """Receive files once; return what the box had to complain about."""
    loop = asyncio.get_running_loop()
    members = {f".{path}": path for path in wanted}
    total = len(files) + len(members)

    def arrived(file: Unpacked) -> None:
        path = members[file.name]
        files[path] = FetchedFile(wanted[path], file.path, path, file.size_bytes, file.sha256)
        if progress is not None:
            loop.call_soon_threadsafe(progress, len(files), total)

    async def listing() -> AsyncIterator[bytes]:
        yield b"".join(os.fsencode(name) + b"\0" for name in sorted(members))

    targets = {name: destination / wanted[path] for name, path in members.items()}
    async with aclosing(box.stream(_SEND, stdin=listing(), timeout_s=timeout_s)) as stream:
        try:
            return await Unpacker(targets, room_bytes, arrived).consume(stream)
        except RemoteScriptFailed as exc:
            # tar complains of files that vanish or grow while it reads them; what counts is what has arrived.
            return exc.stderr.decode(errors="replace").strip()


def _left(deadline: float, most_s: float = float("inf")) -> float:
    return max(0.1, min(most_s, deadline - asyncio.get_running_loop().time()))
