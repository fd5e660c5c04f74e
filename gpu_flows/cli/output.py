"""What a verb says: its result on stdout as a table, as tab-separated text, or as JSON; all else on stderr.

rich is imported only where there is a terminal to make pretty.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from gpu_flows.cli.screen import Screen
from gpu_flows.errors import BadRequest

if TYPE_CHECKING:
    from rich.console import RenderableType

_NARROWEST = 11
"""A column that may be broken over lines gets no narrower than this."""
_PLAIN_WIDTH = 10_000
"""Where nobody looks, nothing is wrapped."""


class Format(StrEnum):
    """How a result is written."""

    TABLE = "table"
    PLAIN = "plain"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell that has a colour."""

    text: str
    style: str = ""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        title: Its heading.
        right: Whether it holds numbers.
        whole: Whether its cells must not be broken over lines.
    """

    title: str
    right: bool = False
    whole: bool = True


class Output:
    """Where a verb writes.

    Args:
        format: How the result is written; by default as a table on a terminal, and as plain text elsewhere.
    """

    def __init__(self, format: Format | None = None) -> None:  # noqa: A002 - the flag's name
        self.format = format or (Format.TABLE if sys.stdout.isatty() else Format.PLAIN)
        self.screen = Screen()
        self._said_result = False

    @classmethod
    def of(cls, text: str | None) -> Output:
        """Return the output for what a user wrote behind ``--format``.

        Raises:
            BadRequest: When there is no such format.
        """
        try:
            return cls(Format(text.strip().lower()) if text else None)
        except ValueError as error:
            raise BadRequest(f"there is no format {text!r}", hint=f"it is {', '.join(Format)}") from error

    def table(
        self, document: Mapping[str, Any], columns: Sequence[Column], rows: Iterable[Sequence[str | Cell]]
    ) -> None:
        """Write a list of things.

        Args:
            document: All of it as plain JSON values.
            columns: The columns for people.
            rows: The cells.
        """
        if self.format is Format.JSON:
            self._json(document)
        elif self.format is Format.PLAIN:
            self._write("\t".join(column.title for column in columns))
            for row in rows:
                self._write("\t".join(" ".join(str(cell).split()) for cell in row))
        elif cells := list(rows):
            self._print(_rich_table(columns, cells))

    def report(self, document: Mapping[str, Any], pretty: RenderableType) -> None:
        """Write one result that knows how to look good.

        Args:
            document: All of it as plain JSON values.
            pretty: What rich prints.
        """
        if self.format is Format.JSON:
            self._json(document)
        else:
            self._print(pretty)

    def document(self, document: Mapping[str, Any]) -> None:
        """Write a result that is JSON and nothing else."""
        self._json(document)

    def lines(self, source: str, lines: Iterable[str]) -> None:
        """Write lines of a log, with where they come from."""
        for line in lines:
            self._write(f"{source:10} {line}")

    def raw(self, data: bytes) -> None:
        """Write bytes as they are."""
        self.screen.stop()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def say(self, message: str) -> None:
        """Write a sentence on stderr."""
        self.screen.say(message)

    def command(self, line: str) -> None:
        """Write a command line on stderr, for the user to copy."""
        self.screen.say(f"  {line}", whole=True)

    def failed(self, code: str, message: str, *, hint: str | None = None, notes: Iterable[str] = ()) -> None:
        """Say what failed, once on stderr and, where JSON is asked for, as the document on stdout."""
        self.screen.failed(message, hint=hint, notes=notes, word="" if code == "INTERRUPTED" else "error")
        if self.format is Format.JSON and not self._said_result:
            error = {"code": code, "message": message, "hint": hint}
            self._json({"ok": False, "error": error})

    def traceback(self) -> None:
        """Write the traceback of the exception that is being handled."""
        import traceback

        self.screen.stop()
        traceback.print_exc()

    def abandon(self) -> None:
        """Write nothing more on stdout: its reader has gone."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def close(self) -> None:
        """Take down what is on the screen, and let everything out."""
        self.screen.stop()

    def _json(self, document: Mapping[str, Any]) -> None:
        self._said_result = True
        self._write(json.dumps(document, indent=2, ensure_ascii=False))

    def _print(self, pretty: RenderableType) -> None:
        from rich.console import Console

        self.screen.stop()
        self._said_result = True
        if self.format is Format.TABLE:
            # A blank line, where it follows what went on.
            Console(highlight=False).print(*(("",) if self.screen.said else ()), pretty, sep="\n")
            return
        console = Console(width=_PLAIN_WIDTH, color_system=None, highlight=False)
        with console.capture() as captured:
            console.print(pretty)
        self._write("\n".join(line.rstrip() for line in captured.get().rstrip().splitlines()))

    def _write(self, line: str) -> None:
        self.screen.stop()
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def _rich_table(columns: Sequence[Column], rows: Iterable[Sequence[str | Cell]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    cells = [list(row) for row in rows]
    for index, column in enumerate(columns):
        longest = max([len(column.title), *(len(str(row[index])) for row in cells)])
        table.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=column.whole,
            overflow="fold",
            min_width=longest if column.whole else min(longest, _NARROWEST),
        )
    for row in cells:
        table.add_row(*(Text(str(cell), style=cell.style if isinstance(cell, Cell) else "") for cell in row))
    return table


def usd(dollars: float | None, digits: int = 2) -> str:
    """Return dollars as people write them; ``?`` where nobody knows."""
    return "?" if dollars is None else f"{dollars:.{digits}f}"


def length(span: timedelta) -> str:
    """Return a length of time in its two largest units: ``1 d 3 h``, ``12 min``, ``45 s``."""
    seconds = max(0, round(span.total_seconds()))
    days, hours, minutes = seconds // 86400, seconds // 3600 % 24, seconds // 60 % 60
    if days:
        return f"{days} d {hours} h" if hours else f"{days} d"
    if hours:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{minutes} min" if minutes else f"{seconds} s"
