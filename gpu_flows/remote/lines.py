"""From raw log bytes to lines that a person can read: decoded, without terminal codes, progress bars collapsed."""

from __future__ import annotations

import codecs
import re
import time
from collections import deque
from collections.abc import Callable

from gpu_flows.remote.masking import Masker

_ESCAPE = re.compile(
    r"""
      (?:\x1b\[|\x9b) (?P<number>[0-?]*) [ -/]* (?P<final>[@-~])          # cursor, colour, erase
    | (?:\x1b\]|\x9d) [^\x07\x1b\x9c]* (?:\x07|\x1b\\|\x9c)               # titles, hyperlinks
    | (?:\x1b[PX^_]|[\x90\x98\x9e\x9f]) [^\x1b\x9c]* (?:\x1b\\|\x9c)      # strings for the terminal
    | \x1b [ -/]* [0-~]                                                   # character sets, reset
    """,
    re.VERBOSE,
)
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0c\x0e-\x1f\x7f\x80-\x9f]")
_SPECIAL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BACKSPACES = re.compile(r"\x08+")
_LINE_END = re.compile(r"\r\n|\n|\r(?!\Z)")  # a \r at the very end may become \r\n

_ESCAPE_CHARS = 256  # an unfinished escape sequence that is longer is none
_ROWS = 32  # as far as a cursor that moves up is followed
_LAST_LINES = 20


class LineStream:
    r"""Turns log bytes into lines, as they come.

    A line ends at ``\n``. What ends at ``\r``, or was reached by moving the cursor up, is a state of a progress
    bar: of each bar only the last state is kept, and shown now and then. Nothing else is dropped unless
    `flood_lines_per_s` is given.

    Args:
        masker: Masks secrets.
        clock: Monotonic seconds.
        progress_per_s: How often at most the states of progress bars are shown.
        flood_lines_per_s: Beyond so many lines within a second the rest is left out, except for the last
            20, and a line says how many; None for no limit.
        line_chars: A longer line comes in pieces of this length.
    """

    def __init__(
        self,
        *,
        masker: Masker | None = None,
        clock: Callable[[], float] = time.monotonic,
        progress_per_s: float = 1.0,
        flood_lines_per_s: int | None = None,
        line_chars: int = 4096,
    ) -> None:
        self._masker = masker or Masker({})
        self._masked = self._masker.stream()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._clock = clock
        self._line_chars = line_chars
        self._text = ""  # since the last line end
        self._row = 0  # of the cursor: 0 is the last line, -1 the one above
        self._overwrites = False  # the text began after a \r
        self._bars: dict[int, str] = {}  # states not shown yet, by row
        self._shown = ""  # the last state that was
        self._progress_interval_s = 1 / progress_per_s
        self._progress_at = float("-inf")
        self._flood = _Flood(flood_lines_per_s, clock)

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that are complete now, and the states of progress bars that are due."""
        return self._feed(self._decoder.decode(self._masked.feed(data)))

    def tick(self) -> list[str]:
        """Return what is due without more data: call it now and then while the job is silent."""
        out = self._flood.tick()
        if self._overwrites:  # a bar writes its \r first, so its current state has no end yet
            before = self._row
            self._note_bar(*self._clean(self._text))
            self._row = before
        return out + self._due_bars()

    def close(self) -> list[str]:
        """Return what is left, at the end of the log."""
        text = self._decoder.decode(self._masked.finish(), final=True)
        out = self._feed(text + "\n") if self._text or text else []
        return [*out, *self._show_bars(), *self._flood.close()]

    def _feed(self, text: str) -> list[str]:
        out: list[str] = []
        self._text += text
        if self._row == 0 and not self._overwrites and not _SPECIAL.search(self._text):
            # Most logs are nothing but lines: three times as fast as looking for line ends of every kind.
            *lines, self._text = self._text.split("\n")
            for line in lines:
                out += self._line(line)
        begin = 0
        for end in _LINE_END.finditer(self._text):
            segment, row = self._clean(self._text[begin : end.start()])
            begin = end.end()
            if end[0] == "\r":
                self._note_bar(segment, row)
                self._overwrites = True
            elif self._row < 0:  # only moves the cursor down again
                self._note_bar(segment, row)
                self._row += 1
                self._overwrites = self._row < 0
            else:
                out += self._line(segment)
                self._overwrites = False
        self._text = self._text[begin:]
        while len(self._text) > self._line_chars + _ESCAPE_CHARS:
            cut = self._cut()
            out += self._flood.pass_on(self._pieces(self._clean(self._text[:cut])[0]))
            self._text = self._text[cut:]
        return out + self.tick()

    def _line(self, text: str) -> list[str]:
        state = self._bars.pop(self._row, None)
        line: str | None = text
        if not text and (self._overwrites or state):
            line = state  # the bar's last state stays, the empty line after it does not
        shown = self._pieces(line) if line is not None else []
        above = self._due_bars()
        self._bars = {row - 1: bar for row, bar in self._bars.items()}
        return above + self._flood.pass_on(shown)

    def _note_bar(self, state: str, row: int) -> None:
        if state.strip() and state != self._shown:
            self._bars[row] = state

    def _due_bars(self) -> list[str]:
        is_due = self._clock() - self._progress_at >= self._progress_interval_s
        return self._show_bars() if self._bars and is_due else []

    def _show_bars(self) -> list[str]:
        states = [self._bars[row] for row in sorted(self._bars)]
        self._bars.clear()
        if states:
            self._shown = states[-1]
            self._progress_at = self._clock()
        return [piece for state in states for piece in self._pieces(state)]

    def _pieces(self, line: str) -> list[str]:
        line = self._masker.mask(line)  # again: colours may have stood within a secret
        size = self._line_chars
        return [line[at : at + size] for at in range(0, len(line), size)] or [""]

    def _cut(self) -> int:
        """Return where an endless line can be cut without cutting an escape sequence."""
        escape = self._text.rfind("\x1b", self._line_chars - _ESCAPE_CHARS, self._line_chars)
        if escape > 0:
            match = _ESCAPE.match(self._text, escape)
            if match is not None and match.end() > self._line_chars:
                return escape
        return self._line_chars

    def _clean(self, text: str) -> tuple[str, int]:
        """Return text as it would be seen, and the row that it was written to."""
        if text.isprintable():
            return text, self._row
        parts: list[str] = []
        row, at = self._row, 0
        for escape in _ESCAPE.finditer(text):
            if at < escape.start():
                parts.append(text[at : escape.start()])
                row = self._row
            self._follow_cursor(escape)
            at = escape.end()
        if at < len(text):
            parts.append(text[at:])
            row = self._row
        return _CONTROL.sub("", _backspaced("".join(parts))), row

    def _follow_cursor(self, escape: re.Match[str]) -> None:
        final, number = escape["final"], escape["number"] or "1"
        if final in ("A", "B", "E", "F") and number.isdigit():
            rows = int(number) if final in ("B", "E") else -int(number)
            self._row = max(-_ROWS, min(0, self._row + rows))
        elif final == "H":  # the whole screen is drawn anew
            self._row = 0


def _backspaced(text: str) -> str:
    before, *parts = _BACKSPACES.split(text)
    for run, part in zip(_BACKSPACES.findall(text), parts, strict=True):
        before = before[: max(0, len(before) - len(run))] + part
    return before


class _Flood:
    """Lets so many lines pass within a second, remembers the last of the rest and how many they were."""

    def __init__(self, lines_per_s: int | None, clock: Callable[[], float]) -> None:
        self._limit = lines_per_s
        self._clock = clock
        self._window_at = float("-inf")
        self._passed = 0
        self._left_out = 0
        self._last: deque[str] = deque(maxlen=_LAST_LINES)

    def pass_on(self, lines: list[str]) -> list[str]:
        if self._limit is None:
            return lines
        out = self.tick()
        for line in lines:
            if self._passed < self._limit:
                self._passed += 1
                out.append(line)
            else:
                self._left_out += len(self._last) == self._last.maxlen
                self._last.append(line)
        return out

    def tick(self) -> list[str]:
        if self._limit is None or self._clock() - self._window_at < 1:
            return []
        self._window_at, self._passed = self._clock(), 0
        return self.close()

    def close(self) -> list[str]:
        out = [f"[{self._left_out} lines left out; the raw log has them]"] if self._left_out else []
        out += self._last
        self._last.clear()
        self._left_out = 0
        return out
