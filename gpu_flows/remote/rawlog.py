"""A local copy of a log that a later process continues at exactly the right byte."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gpu_flows.remote.masking import Masker

_SAVE_EVERY_BYTES = 1 << 20
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Digest:
    """What was received of a log in one go.

    Attributes:
        start: The first raw byte.
        end: The raw byte behind the last.
        sha256: Of the raw bytes between, as they came, before anything was masked.
    """

    start: int
    end: int
    sha256: str


class RawLog:
    """Stores what `follow` hands it: masked, readable by the user alone, and continued where it broke off.

    Masking changes lengths, so a file beside the log (``<name>.state``) says which raw byte its end stands
    for. After a crash the log is cut back to what that file says; the rest is received again.

    Args:
        path: Where to store the log; its folder must exist.
        masker: Masks secrets.

    Attributes:
        path: Where it is stored.
        offset: Raw bytes received: the next `follow` begins there.
    """

    def __init__(self, path: Path, masker: Masker | None = None) -> None:
        self.path = path
        self._state_path = path.with_name(path.name + ".state")
        state = _read_state(self._state_path, path)
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
        self._file.truncate(state.stored)
        self._stream = (masker or Masker({})).stream(state.covered)
        self._held = b""
        self._masked = state.masked
        self._done = list(state.digests)
        self._sha256 = hashlib.sha256()
        self._start = 0 if not state.masked else state.offset
        if not state.masked:  # then what is stored is what came: one digest for all of it
            self._done.clear()
            while data := self._file.read(_READ_BYTES):
                self._sha256.update(data)
        self._file.seek(state.stored)
        self._saved = self.offset = state.offset

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, data: bytes) -> None:
        """Take the next raw bytes; this is the sink for `follow`."""
        self.offset += len(data)
        self._store(data, self._stream.feed(data))
        if self.offset - self._saved >= _SAVE_EVERY_BYTES:
            self.save()

    def finish(self) -> None:
        """Store what was held back because it might have become a secret: the log is at its end."""
        self._store(b"", self._stream.finish())
        self.save()

    def save(self) -> None:
        """Write down how far the stored log goes."""
        self._file.flush()
        state = _State(
            offset=self.offset - len(self._held),
            stored=self._file.tell(),
            covered=self._stream.covered,
            masked=self._masked,
            digests=self.digests,
        )
        new = self._state_path.with_name(self._state_path.name + ".new")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(asdict(state), file)
        new.replace(self._state_path)
        self._saved = self.offset

    def close(self) -> None:
        """Save and close; a later `RawLog` of the same path continues here."""
        if not self._file.closed:
            self.save()
            self._file.close()

    @property
    def digests(self) -> tuple[Digest, ...]:
        """The digests of all raw bytes stored, in order; one, unless a process continued a masked log."""
        end = self.offset - len(self._held)
        if end == self._start:
            return tuple(self._done)
        return (*self._done, Digest(self._start, end, self._sha256.hexdigest()))

    def _store(self, raw: bytes, masked: bytes) -> None:
        raw = self._held + raw
        released, self._held = raw[: len(raw) - self._stream.held], raw[len(raw) - self._stream.held :]
        self._sha256.update(released)
        self._masked = self._masked or masked != released
        self._file.write(masked)


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    offset: int = 0
    stored: int = 0
    covered: int = 0
    masked: bool = False
    digests: tuple[Digest, ...] = ()


def _read_state(state_path: Path, path: Path) -> _State:
    """Return how far the stored log goes; nowhere when that cannot be told, so that it is received anew."""
    try:
        data: dict[str, Any] = json.loads(state_path.read_text())
        data["digests"] = tuple(Digest(**digest) for digest in data["digests"])
        state = _State(**data)
        return state if path.stat().st_size >= state.stored else _State()
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return _State()
