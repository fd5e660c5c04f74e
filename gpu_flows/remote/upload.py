"""Code goes to a box: one tar stream of what has changed, with nothing on the box but sh, tar and find.

Measured for 5,000 small files over 50 ms of round trip: one tar stream 2.4-3.3 s, SFTP 13 minutes; and some
boxes have no SFTP at all.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_flows.errors import BadRequest
from gpu_flows.remote.archive import gzipped, in_thread, pack
from gpu_flows.remote.connect import is_loopback
from gpu_flows.remote.errors import SshUnreachable
from gpu_flows.remote.persist import persistently
from gpu_flows.remote.ssh import RemoteBox
from gpu_flows.remote.tree import Entry, Tree, pack_manifest, scan_tree, unpack_manifest

Transferred = Callable[[int, int], None]
"""Called with the bytes of content that are done, and those of all."""

_PATIENCE_S = 120.0
_COMPRESS_FROM_BYTES = 64 << 10
_SAMPLE_BYTES = 64 << 10
_SAMPLED_FILES = 8
_WORTH_IT = 0.8

# What every script begins with: $target as an absolute path.
_RESOLVE = r"""
set -eu
case $1 in
"~") target=$HOME ;;
"~/"*) target=$HOME/${1#"~/"} ;;
/*) target=$1 ;;
*) target=$HOME/$1 ;;
esac
"""

# $1 target, $2 digest. Replies: the target's absolute path, whether gzip is there, then the marker, if it has one;
# of a marker with that digest only the first line.
_LOOK = (
    _RESOLVE
    + r"""
gzip=no
if command -v gzip >/dev/null 2>&1; then gzip=yes; fi
printf '%s\0%s\0' "$target" "$gzip"
marker=$target/.gpu-flows-upload
if [ -f "$marker" ]; then
    IFS= read -r digest <"$marker" || :
    if [ "$digest" = "$2" ]; then printf '%s\n' "$digest"; else cat "$marker"; fi
fi
"""
)

# $1 target, $2 yes if stdin is gzipped; stdin is the archive. A new target appears as a whole, by rename. One that
# is there is changed only once everything has arrived, file by file, each by rename; what the upload does not
# know, such as outputs, stays. Until the end its marker says "applying", so that the next upload sends all.
_STORE = (
    _RESOLVE
    + r"""
umask 077
parent=${target%/*}
mkdir -p "${parent:-/}"
if [ -e "$target" ]; then beside=$target; else beside=${parent:-/}; fi
find "$beside" -maxdepth 1 -name '.gpu-flows-stage.*' -mmin +120 -exec rm -rf {} + || :
stage=$(mktemp -d "$beside/.gpu-flows-stage.XXXXXX")
trap 'rm -rf "$stage"' EXIT
trap 'exit 1' HUP INT TERM PIPE
# -o: as root, tar would restore owners, which network volumes refuse.
if [ "$2" = yes ]; then gzip -dc | tar -xof - -C "$stage"; else tar -xof - -C "$stage"; fi
marker=.gpu-flows-upload
if [ ! -f "$stage/$marker" ]; then echo "the upload did not arrive whole" >&2; exit 1; fi
gone=$stage/.gpu-flows-gone empty=$stage/.gpu-flows-empty
if [ ! -e "$target" ]; then
    rm -f "$gone" "$empty"
    if mv -T "$stage" "$target" 2>/dev/null; then exit 0; fi
fi
cd "$target"
mv -f "$stage/$marker" "$stage/.gpu-flows-new"
if [ -f "$marker" ]; then
    { echo applying; tail -n +2 "$marker"; } >"$stage/.gpu-flows-old"
    mv -f "$stage/.gpu-flows-old" "$marker"
fi
if [ -s "$gone" ]; then xargs -0 rm -f -- <"$gone"; fi
if [ -s "$empty" ]; then xargs -0 rmdir -- <"$empty" 2>/dev/null || :; fi
rm -f "$gone" "$empty"
cd "$stage"
find . -type d -print0 | (cd "$target" && xargs -0 mkdir -p --)
# One mv for all files of a folder: 5,000 single ones take seconds. It replaces a link, and refuses a folder.
find . -type d -print0 | target=$target xargs -0 sh -c '
    for folder; do
        find "$folder" -maxdepth 1 ! -type d ! -name .gpu-flows-new -print0 |
            into=$target/$folder xargs -0 sh -c "[ \$# = 0 ] || mv -f -- \"\$@\" \"\$into/\"" sh || exit 255
    done' sh
mv -f .gpu-flows-new "$target/$marker"
cd /
"""
)


@dataclass(frozen=True, slots=True)
class Upload:
    """What an upload did.

    Attributes:
        digest: SHA-256 of the code's manifest: equal for equal code.
        target: Absolute folder on the box.
        files: Number of files and links of the code.
        total_bytes: Of all of them.
        sent_bytes: What went over the wire for it.
        ignored: What ignore rules left out; a folder ends with a slash.
        unchanged: The box had it all already.
        warnings: What the user should know, one sentence each.
    """

    digest: str
    target: str
    files: int
    total_bytes: int
    sent_bytes: int
    ignored: tuple[str, ...]
    unchanged: bool
    warnings: tuple[str, ...] = ()


async def upload_tree(
    box: RemoteBox,
    source: Path | Tree,
    target: str,
    *,
    include: Sequence[str] = (),
    progress: Transferred | None = None,
    compress: bool | None = None,
    patience_s: float = _PATIENCE_S,
    timeout_s: float,
) -> Upload:
    """Make a folder on the box hold the code of a folder here.

    Only what has changed since the last upload travels; when nothing has, one round trip tells. Files on the box
    that no upload brought, such as outputs of an earlier run, are left alone.

    Args:
        box: The box.
        source: A folder or a single file; or what `scan_tree` made of it.
        target: Folder on the box; relative to the home unless absolute, ``~/`` allowed.
        include: Globs of ignored files that are wanted all the same.
        progress: Hears how far it is.
        compress: Whether to; by default where it pays.
        patience_s: How long to try to reach a box that was lost meanwhile.
        timeout_s: For all of it.

    Raises:
        BadRequest: When there is no such code.
        CodeChanged: When it was edited meanwhile.
        SshError: When the box cannot be reached or does not take it.
    """
    tree = source if isinstance(source, Tree) else await asyncio.to_thread(scan_tree, source, include)
    if not target.strip("/") or "\0" in target:
        raise BadRequest(f"{target!r} is no folder to upload to")
    deadline = asyncio.get_running_loop().time() + timeout_s
    sent_bytes = 0
    while True:
        there = await _look(box, target, tree.digest, _left(deadline, patience_s))
        parcel = _Parcel(tree, there)
        if there.digest == tree.digest:
            return parcel.receipt(sent_bytes, unchanged=not sent_bytes)
        if compress is None:
            compress = not is_loopback(box.endpoint) and await asyncio.to_thread(_pays, tree, parcel.changed)
        squeeze = compress and there.has_gzip
        sending = _Sending(parcel, squeeze, progress)
        try:
            await box.script(
                _STORE, target, "yes" if squeeze else "no", stdin=sending.stream(), timeout_s=_left(deadline)
            )
            return parcel.receipt(sent_bytes + sending.sent_bytes)
        except SshUnreachable:
            sent_bytes += sending.sent_bytes
            if asyncio.get_running_loop().time() >= deadline:
                raise


@dataclass(frozen=True, slots=True)
class _There:
    """What the box has.

    Attributes:
        target: The folder, absolute.
        has_gzip: Whether it can unpack gzip.
        digest: Of the code in it; empty when it has none, or an upload was cut while it changed the folder.
        known: What earlier uploads brought.
    """

    target: str
    has_gzip: bool
    digest: str
    known: tuple[Entry, ...]


async def _look(box: RemoteBox, target: str, digest: str, timeout_s: float) -> _There:
    reply = await persistently(
        lambda left_s: box.script(_LOOK, target, digest, timeout_s=left_s), timeout_s=timeout_s
    )
    absolute, has_gzip, marker = reply.split(b"\0", 2)
    first, _, manifest = marker.partition(b"\n")
    try:
        known = unpack_manifest(manifest)
    except ValueError:
        first, known = b"", ()
    whole = first.decode(errors="replace") if first != b"applying" else ""
    return _There(os.fsdecode(absolute), has_gzip == b"yes", whole, known)


class _Parcel:
    """What has to travel so that a box comes to hold a tree."""

    def __init__(self, tree: Tree, there: _There) -> None:
        self.tree = tree
        self.there = there
        same = set(there.known) if there.digest else set()
        # Sizes are not in a manifest; kind, content and path decide.
        self.changed = [e for e in tree.entries if Entry(e.path, e.kind, e.content) not in same]
        self.changed_bytes = sum(entry.size for entry in self.changed)
        present = {entry.path for entry in tree.entries}
        gone = [entry.path for entry in there.known if entry.path not in present]
        folders = {folder for path in gone for folder in _folders_of(path)}
        folders |= {entry.path for entry in there.known if entry.kind == "d" and entry.path in gone}
        self.extra = {
            ".gpu-flows-gone": _names(gone),
            ".gpu-flows-empty": _names(sorted(folders, key=len, reverse=True)),
            ".gpu-flows-upload": f"{tree.digest}\n".encode() + pack_manifest(tree.entries),
        }

    def receipt(self, sent_bytes: int, *, unchanged: bool = False) -> Upload:
        tree = self.tree
        return Upload(
            digest=tree.digest,
            target=self.there.target,
            files=len(tree.entries),
            total_bytes=tree.total_bytes,
            sent_bytes=sent_bytes,
            ignored=tree.ignored,
            unchanged=unchanged,
            warnings=tree.warnings,
        )


class _Sending:
    """One attempt to send a parcel."""

    def __init__(self, parcel: _Parcel, squeeze: bool, progress: Transferred | None) -> None:
        self._parcel = parcel
        self._squeeze = squeeze
        self._progress = progress
        self._read_bytes = 0
        self.sent_bytes = 0

    async def stream(self) -> AsyncIterator[bytes]:
        total = self._parcel.changed_bytes
        blocks = self._counted(pack(self._parcel.tree.root, self._parcel.changed, self._parcel.extra))
        async for batch in in_thread(gzipped(blocks) if self._squeeze else blocks):
            yield batch
            self.sent_bytes += len(batch)
            if self._progress is not None:
                self._progress(min(self._read_bytes, total), total)

    def _counted(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        for block in blocks:
            self._read_bytes += len(block)
            yield block


def _folders_of(path: str) -> Iterable[str]:
    while path := posixpath.dirname(path):
        yield path


def _names(paths: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(path) + b"\0" for path in paths)


def _pays(tree: Tree, entries: Sequence[Entry]) -> bool:
    """Tell whether compressing is worth the time, from the beginnings of the largest files."""
    if sum(entry.size for entry in entries) < _COMPRESS_FROM_BYTES:
        return False
    raw = packed = 0
    for entry in sorted(entries, key=lambda entry: -entry.size)[:_SAMPLED_FILES]:
        if entry.is_file:
            with (tree.root / entry.path).open("rb") as file:
                sample = file.read(_SAMPLE_BYTES)
            raw += len(sample)
            packed += len(zlib.compress(sample, 1))
    return packed < raw * _WORTH_IT


def _left(deadline: float, most_s: float = float("inf")) -> float:
    return max(0.1, min(most_s, deadline - asyncio.get_running_loop().time()))
