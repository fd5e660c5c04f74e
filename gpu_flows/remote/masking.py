"""Secrets are masked by value in whatever is stored or shown, also where a chunk boundary cuts through one."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterable, Mapping

MASK = "***"

SHORTEST = 4
"""A shorter value occurs by chance all the time; masking it would tear holes into the text and hide nothing."""
_SHORTEST_LINE = 8
"""The same for a single line of a value of several, such as the ``}`` of a JSON key file."""


class Masker:
    """Masks the values of secrets, and what they look like quoted for JSON, Python and URLs.

    Each line of a value of several lines is masked by itself too: logs indent and prefix lines.

    Args:
        secrets: Values by name; only the values are looked for.

    Attributes:
        notes: What is not masked, in words, without values.
    """

    def __init__(self, secrets: Mapping[str, str]) -> None:
        short = [name for name, value in secrets.items() if len(value) < SHORTEST]
        self.notes = tuple(f"the value of {name} is too short to be masked in logs" for name in short)
        spellings = {s for value in secrets.values() if len(value) >= SHORTEST for s in _spellings(value)}
        self._patterns = tuple(sorted((_encoded(s) for s in spellings), key=len, reverse=True))

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def mask(self, text: str) -> str:
        """Return text with every secret in it masked."""
        if not self._patterns:
            return text
        data = _encoded(text)
        spans = self._spans(data)
        if not spans:
            return text
        masked, _ = _masked(data, spans, len(data), skip_first=False)
        return masked.decode("utf-8", "surrogateescape")

    def stream(self, covered: int = 0) -> MaskedStream:
        """Return a masker of a byte stream.

        Args:
            covered: How many of the first bytes belong to a secret that was masked already (`MaskedStream`).
        """
        return MaskedStream(self, covered)

    def _spans(self, data: bytes, covered: int = 0) -> list[tuple[int, int]]:
        """Return where secrets are, in order, those that overlap as one."""
        found = [(0, covered)] if covered else []
        for pattern in self._patterns:
            at = data.find(pattern)
            while at >= 0:
                found.append((at, at + len(pattern)))
                at = data.find(pattern, at + 1)
        found.sort()
        spans: list[tuple[int, int]] = []
        for start, end in found:
            if spans and start < spans[-1][1]:
                spans[-1] = (spans[-1][0], max(spans[-1][1], end))
            else:
                spans.append((start, end))
        return spans

    def _undecided(self, data: bytes) -> int:
        """Return the first position from which the rest may be the beginning of a secret."""
        first = len(data)
        for pattern in self._patterns:
            at = data.find(pattern[:1], max(0, len(data) - len(pattern) + 1))
            while 0 <= at < first:
                if pattern.startswith(data[at:]):
                    first = at
                    break
                at = data.find(pattern[:1], at + 1)
        return first


class MaskedStream:
    """Masks a byte stream chunk by chunk, holding back what may turn out to be the beginning of a secret.

    Attributes:
        held: How many bytes of what came in are held back.
        covered: How many of those belong to a secret whose mask is out already.
    """

    def __init__(self, masker: Masker, covered: int = 0) -> None:
        self._masker = masker
        self._held = b""
        self.covered = covered

    @property
    def held(self) -> int:
        """How many bytes of what came in are held back."""
        return len(self._held)

    def feed(self, data: bytes) -> bytes:
        """Return what can be told of the stream so far and was not returned before."""
        if not self._masker:
            return data
        data = self._held + data
        return self._release(data, self._masker._undecided(data))

    def finish(self) -> bytes:
        """Return what was held back, at the end of the stream."""
        return self._release(self._held, len(self._held))

    def _release(self, data: bytes, until: int) -> bytes:
        spans = self._masker._spans(data, self.covered)
        out, covered = _masked(data, spans, until, skip_first=self.covered > 0)
        self._held, self.covered = data[until:], covered
        return out


def _masked(data: bytes, spans: list[tuple[int, int]], until: int, *, skip_first: bool) -> tuple[bytes, int]:
    """Return data up to a position with spans masked, and how far the last mask reaches beyond it."""
    out: list[bytes] = []
    at = 0
    for number, (start, end) in enumerate(spans):
        is_out = skip_first and number == 0
        if start >= until and not is_out:
            break
        out.append(data[at:start])
        if not is_out:
            out.append(MASK.encode())
        at = end
    out.append(data[at:until])
    return b"".join(out), max(0, at - until)


def _spellings(value: str) -> Iterable[str]:
    yield value
    yield value.strip()
    yield json.dumps(value)[1:-1]
    yield repr(value)[1:-1]
    yield urllib.parse.quote(value, safe="", errors="surrogateescape")
    lines = value.splitlines()
    if len(lines) > 1:
        yield from (line.strip() for line in lines if len(line.strip()) >= _SHORTEST_LINE)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
