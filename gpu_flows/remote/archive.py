"""Trees as tar streams: packed the same way every time, and unpacked without trusting who sent them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import queue
import secrets
import stat
import tarfile
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from gpu_flows.remote.errors import CannotWrite, CodeChanged, FetchTooLarge, UnwantedArchive
from gpu_flows.remote.tree import Entry

_BLOCK_BYTES = 256 << 10
_BATCH_BYTES = 1 << 20  # a hop to another thread costs about as much as reading this much
_OLDEST = 1_577_836_800  # 2020: zip files, and so wheels built on the box, know no time before 1980
_SPAN_S = 5 * 365 * 86_400
_LARGEST_HEADER_BYTES = 1 << 20
_BUFFERED_CHUNKS = 32


# Out


def pack(root: Path, entries: Iterable[Entry], extra: Mapping[str, bytes]) -> Iterator[bytes]:
    """Yield a tar archive: the same bytes for the same entries, whatever the machine, user and day.

    Args:
        root: What the entries are relative to.
        entries: In the order in which they are packed.
        extra: More files and their content, packed last.

    Raises:
        CodeChanged: When a file is no longer what its entry says.
    """
    # GNU's format: busybox skips the headers in which pax keeps long names.
    for entry in entries:
        yield _header(entry).tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
        if entry.is_file:
            yield from _content(root, entry)
    for name, content in extra.items():
        info = _header(Entry(name, "f", hashlib.sha256(content).hexdigest(), len(content)))
        yield info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape") + content + _padding(len(content))
    yield bytes(2 * tarfile.BLOCKSIZE)


def _header(entry: Entry) -> tarfile.TarInfo:
    info = tarfile.TarInfo(entry.path)
    info.mode = 0o755 if entry.kind in "xd" else 0o644
    if entry.kind == "l":
        info.type = tarfile.SYMTYPE
        info.linkname = entry.content
        return info
    if entry.kind == "d":
        info.type = tarfile.DIRTYPE
        return info
    info.size = entry.size
    # Made from the content: Python takes a .pyc for current when the time and size of its source are what they
    # were, so with one time for all, a changed file of the same size would run as it was before.
    info.mtime = _OLDEST + int(entry.content[:8], 16) % _SPAN_S
    return info


def _content(root: Path, entry: Entry) -> Iterator[bytes]:
    left = entry.size
    digest = hashlib.sha256()
    with (root / entry.path).open("rb") as file:
        while left and (block := file.read(min(left, _BLOCK_BYTES))):
            left -= len(block)
            digest.update(block)
            yield block
    if left or digest.hexdigest() != entry.content:
        raise CodeChanged(f"{entry.path} was changed while it was uploaded", hint="upload again")
    yield _padding(entry.size)


def _padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)


def gzipped(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Compress as fast as gzip can, without a time in it."""
    packer = zlib.compressobj(1, wbits=16 + zlib.MAX_WBITS)
    for block in blocks:
        if packed := packer.compress(block):
            yield packed
    yield packer.flush()


async def in_thread(blocks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Draw from an iterator that reads files, without holding up the loop."""

    def batch() -> bytes:
        parts: list[bytes] = []
        size = 0
        for block in blocks:
            parts.append(block)
            size += len(block)
            if size >= _BATCH_BYTES:
                break
        return b"".join(parts)

    while part := await asyncio.to_thread(batch):
        yield part


# In


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A file that arrived whole.

    Attributes:
        name: As the archive called it.
        path: Where it lies now.
        size_bytes: Its size.
        sha256: Of its content.
    """

    name: str
    path: Path
    size_bytes: int
    sha256: str


class Unpacker:
    """Takes the chunks of a tar stream and writes the files that were asked for, in a thread of its own.

    Nothing in the archive decides where anything is written: names are looked up, and only regular files are
    taken. A file appears under its name when it is whole.

    Args:
        targets: Where each wanted name goes.
        limit_bytes: How much may be written.
        arrived: Called in that thread with each file.
    """

    def __init__(
        self, targets: Mapping[str, Path], limit_bytes: int, arrived: Callable[[Unpacked], None]
    ) -> None:
        self._targets = targets
        self._left = limit_bytes
        self._arrived = arrived
        self._files: dict[str, Unpacked] = {}

    async def consume(self, chunks: AsyncIterator[bytes]) -> str:
        """Unpack a stream to its end; what has arrived is told by `arrived` alone.

        Returns:
            Why the archive ended early; empty when it did not.

        Raises:
            UnwantedArchive: When something else is in it.
            FetchTooLarge: When it is more than the limit.
            CannotWrite: When a file cannot be written here.
        """
        inbox = _Inbox(asyncio.get_running_loop())
        unpacking = asyncio.ensure_future(asyncio.to_thread(self._unpack, inbox))
        unpacking.add_done_callback(inbox.nobody_reads)
        failure: Exception | None = None
        try:
            async for chunk in chunks:
                await inbox.put(chunk)
                if unpacking.done():
                    break
        except Exception as exc:  # noqa: BLE001 - raised below, unless there is something worse
            failure = exc
        finally:
            inbox.end()
            await asyncio.wait({unpacking})  # soon: it has the end of its input before it
        if unwanted := unpacking.exception():
            raise unwanted from failure
        if failure is not None:
            raise failure
        return unpacking.result()

    def _unpack(self, inbox: _Inbox) -> str:
        try:
            # Several archives may follow each other: xargs starts tar as often as the names need it.
            with tarfile.open(
                fileobj=cast("IO[bytes]", inbox),
                mode="r|",
                ignore_zeros=True,
                tarinfo=_BoundedTarInfo,
                errors="surrogateescape",
                encoding="utf-8",
            ) as archive:
                for member in archive:
                    self._take(archive, member)
        except tarfile.TarError as exc:
            return f"the archive is cut: {exc}"
        return ""

    def _take(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        target = self._targets.get(member.name)
        if target is None:
            raise UnwantedArchive(f"the box sent {member.name!r}, which was not asked for")
        if member.islnk() and member.linkname in self._files:  # a second name of a file before it
            earlier = self._files[member.linkname]
            with earlier.path.open("rb") as source:
                self._write(source, target, member, earlier.size_bytes)
        elif member.isreg() and (content := archive.extractfile(member)) is not None:
            self._write(content, target, member, member.size)
        else:
            raise UnwantedArchive(f"the box sent {member.name!r}, which is no file")

    def _write(self, source: IO[bytes], target: Path, member: tarfile.TarInfo, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise FetchTooLarge(
                f"{member.name!r} has {size} bytes, which is more than there is room for",
                hint="make room, or fetch less",
            )
        part = target.with_name(f".gpu-flows-part.{secrets.token_hex(8)}")
        digest = hashlib.sha256()
        mode = 0o777 if member.mode & stat.S_IXUSR else 0o666  # the umask takes its share
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "wb") as file:
                while block := source.read(_BLOCK_BYTES):
                    digest.update(block)
                    file.write(block)
            os.utime(part, (member.mtime, member.mtime))
            part.replace(target)
        except OSError as exc:
            raise CannotWrite(f"{target} cannot be written: {exc.strerror}") from exc
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
        file_here = Unpacked(member.name, target, size, digest.hexdigest())
        self._files[member.name] = file_here
        self._arrived(file_here)


class _BoundedTarInfo(tarfile.TarInfo):
    """Refuses headers that would be read into memory whole and are larger than any name is."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _BoundedTarInfo:
        info = super().frombuf(buf, encoding, errors)
        if not info.isreg() and info.size > _LARGEST_HEADER_BYTES:
            raise UnwantedArchive(f"the box sent a header of {info.size} bytes")
        return info


class _Inbox:
    """A file that one thread reads while the loop fills it, no faster than that thread reads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._room = asyncio.Semaphore(_BUFFERED_CHUNKS)
        self._chunks = queue.SimpleQueue[bytes]()
        self._rest = io.BytesIO()
        self._ended = False

    async def put(self, chunk: bytes) -> None:
        await self._room.acquire()
        self._chunks.put(chunk)

    def end(self) -> None:
        self._chunks.put(b"")

    def nobody_reads(self, _: object) -> None:
        """Let the loop go on: the reader has ended."""
        self._room.release()

    def read(self, size: int) -> bytes:
        data = self._rest.read(size)
        while not data and not self._ended:
            chunk = self._chunks.get()
            self._ended = not chunk
            self._loop.call_soon_threadsafe(self._room.release)
            self._rest = io.BytesIO(chunk)
            data = self._rest.read(size)
        return data
