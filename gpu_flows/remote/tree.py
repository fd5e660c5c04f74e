"""A folder of code as it is uploaded: its entries with their hashes, and one hash for all of it."""

from __future__ import annotations

import hashlib
import os
import posixpath
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_flows.errors import BadRequest
from gpu_flows.remote.checkout import list_code

_LARGE_BYTES = 500 << 20
_LARGEST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Entry:
    """One file, link, or empty folder.

    Attributes:
        path: Relative to the tree's root, with slashes.
        kind: ``f``, ``x`` (a file that may be executed), ``l`` (a link) or ``d`` (an empty folder).
        content: SHA-256 of a file, target of a link, else empty.
        size: Bytes of a file.
    """

    path: str
    kind: str
    content: str
    size: int = 0

    @property
    def is_file(self) -> bool:
        """Whether it has bytes of its own."""
        return self.kind in "fx"


@dataclass(frozen=True, slots=True)
class Tree:
    """The code as it is now.

    Attributes:
        root: The folder that the entries are relative to.
        entries: Sorted by path.
        ignored: What was left out by ignore rules; a folder ends with a slash.
        warnings: What the user should know before it is uploaded, one sentence each.
    """

    root: Path
    entries: tuple[Entry, ...]
    ignored: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.entries)

    @property
    def manifest(self) -> bytes:
        """What identifies the tree: neither times nor owners, nor where it lies."""
        return pack_manifest(self.entries)

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest."""
        return hashlib.sha256(self.manifest).hexdigest()


def pack_manifest(entries: Sequence[Entry]) -> bytes:
    """Return entries as bytes; fields end with NUL, which no path or target contains."""
    return b"".join(
        field + b"\0"
        for entry in entries
        for field in (entry.kind.encode(), os.fsencode(entry.content), os.fsencode(entry.path))
    )


def unpack_manifest(manifest: bytes) -> tuple[Entry, ...]:
    """Return the entries of a manifest, without sizes.

    Raises:
        ValueError: When it is none, or holds a path that leads out of the tree.
    """
    fields = manifest.split(b"\0")
    if fields.pop() or len(fields) % 3:
        raise ValueError("this is not a manifest")
    entries = []
    for kind, content, path in zip(fields[::3], fields[1::3], fields[2::3], strict=True):
        name = os.fsdecode(path)
        if kind not in (b"f", b"x", b"l", b"d") or not is_within(name):
            raise ValueError("this is not a manifest")
        entries.append(Entry(name, kind.decode(), os.fsdecode(content)))
    return tuple(entries)


def is_within(path: str) -> bool:
    """Tell whether a relative path is plain: it stays below the folder that it is relative to."""
    return bool(path) and not path.startswith("/") and not {"", ".", ".."} & set(path.split("/"))


def scan_tree(source: Path, include: Sequence[str] = ()) -> Tree:
    """Read a folder of code, or a single file, as it would be uploaded.

    Links stay links. One that leads outside the folder would dangle on the box: it is left out with a warning,
    as is what is neither file, folder nor link.

    Args:
        source: The folder or file.
        include: Globs of ignored files that are wanted all the same.

    Raises:
        BadRequest: When there is no such folder or file, or an include matches nothing.
    """
    source = Path(source).expanduser()
    if source.is_file():
        return Tree(source.parent.resolve(), (_file(source, source.name),))
    if not source.is_dir():
        raise BadRequest(f"the code {str(source)!r} does not exist; a folder or a file is wanted")
    root = source.resolve()
    listing = list_code(root, tuple(include))
    return _tree(root, listing.files, listing.ignored, list(listing.warnings))


def _tree(
    root: Path, paths: set[str] | frozenset[str], ignored: tuple[str, ...], warnings: list[str]
) -> Tree:
    entries = []
    for path in sorted(paths, key=os.fsencode):
        try:
            entry = _entry(root, path, warnings)
        except FileNotFoundError:
            continue  # git still knows it, or somebody deletes files while we look
        if entry is not None:
            entries.append(entry)
    warnings += _dangling(entries)
    tree = Tree(root, tuple(entries), ignored)
    if tree.total_bytes > _LARGE_BYTES:
        largest = sorted(entries, key=lambda entry: -entry.size)[:_LARGEST_NAMED]
        named = ", ".join(f"{entry.path} ({entry.size >> 20} MiB)" for entry in largest)
        warnings.append(f"the code in {root} is {tree.total_bytes >> 20} MiB; the largest files are {named}")
    return Tree(root, tuple(entries), ignored, tuple(warnings))


def _entry(root: Path, path: str, warnings: list[str]) -> Entry | None:
    full = root / path
    found = full.lstat()
    if stat.S_ISLNK(found.st_mode):
        target = _target_within(root, path, os.readlink(full))
        if target is None:
            warnings.append(f"the link {path} leads out of {root}, so it is not uploaded")
            return None
        return Entry(path, "l", target)
    if stat.S_ISDIR(found.st_mode):
        return Entry(path, "d", "")
    if not stat.S_ISREG(found.st_mode):
        warnings.append(f"{path} is neither a file nor a folder nor a link, so it is not uploaded")
        return None
    return _file(full, path)


def _file(full: Path, path: str) -> Entry:
    with full.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        found = os.fstat(file.fileno())
        return Entry(path, "x" if found.st_mode & stat.S_IXUSR else "f", digest, file.tell())


def _target_within(root: Path, path: str, target: str) -> str | None:
    """Return a link's target, made relative where it was absolute; None when it leads out of the tree."""
    here = posixpath.dirname(path)
    if target.startswith("/"):
        below = posixpath.relpath(posixpath.normpath(target), str(root))
        target = posixpath.relpath(below, here or ".")
    inside = posixpath.normpath(posixpath.join(here, target))
    return None if inside == ".." or inside.startswith("../") else target


def _dangling(entries: Sequence[Entry]) -> list[str]:
    """Warn of links to what is not uploaded."""
    present = {"."}
    for entry in entries:
        path = entry.path
        while path and path not in present:
            present.add(path)
            path = posixpath.dirname(path)
    dangling = []
    for entry in entries:
        leads_to = posixpath.normpath(posixpath.join(posixpath.dirname(entry.path), entry.content))
        if entry.kind == "l" and leads_to not in present:
            dangling.append(f"the link {entry.path} leads to {leads_to}, which is not uploaded")
    return dangling
