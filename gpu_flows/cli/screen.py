"""What goes on, on stderr: a line for everything that happened, and on a terminal what is being waited for.

Calls come from several threads. rich is imported only on a terminal.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gpu_flows.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console

_STEP_WIDTH = 10
_BAD = ("failed", "lost", "unkillable", "ambiguous", "silent", "none", "unlisted", "unwritable")
_PHASES = {
    "resolve": "asking the clouds",
    "provision": "renting, and waiting for the boxes",
    "upload": "uploading the code",
    "start": "starting the job",
    "train": "training",
    "outputs": "fetching the outputs",
    "teardown": "giving the boxes back",
}
_SAID_ALREADY = "gpu-flows: node "
"""What a node's log begins with: its command line, which was shown when the job was started."""
_GOOD = ("ready", "gone", "started", "uploaded")


class Screen:
    """Shows progress, log lines and errors on stderr.

    Attributes:
        said: Whether anything was shown.
    """

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._console: Console | None = None
        self._live: Any = None
        self._task: Any = None
        self._bar: Any = None
        self._lock = threading.RLock()
        self.said = False

    def __call__(self, progress: Progress) -> None:
        """Show something that happened; a `gpu_flows.progress.Listener`."""
        if progress.kind == "phase.began":
            self.waiting(_PHASES.get(progress.step, progress.step))
        if not progress.message:
            return
        ending = progress.kind.rpartition(".")[2]
        style = "red" if ending in _BAD else "green" if ending in _GOOD else ""
        self._line(progress.step, progress.message, style=style)

    def log_line(self, source: str, line: str) -> None:
        """Show a line that the job wrote; a `gpu_flows.training.logbook.ShowLine`."""
        if not line.startswith(_SAID_ALREADY):
            # A launcher repeats at length what a rank has said.
            self._line(source, line, bar=True, style="dim" if source.startswith("node") else "")

    def say(self, message: str, *, whole: bool = False) -> None:
        """Show a sentence; a command line stays whole, so that it can be copied."""
        if self._terminal:
            self._rich().print(message, markup=False, highlight=False, soft_wrap=whole)
        else:
            _write(message)

    def failed(
        self, message: str, *, hint: str | None = None, notes: Iterable[str] = (), word: str = "error"
    ) -> None:
        """Show what failed, and what to do about it."""
        self.stop()
        lines = [(word, message), *(("", note) for note in notes)]
        lines += [("hint", hint)] if hint else []
        for title, text in lines:
            if self._terminal:
                from rich.text import Text

                style = {"error": "bold red", "hint": "bold"}.get(title, "")
                # Hints are what is copied.
                shown = Text.assemble((f"{title}: " if title else "", style), text)
                self._rich().print(shown, soft_wrap=title == "hint")
            else:
                _write(f"{title}: {text}" if title else text)

    def waiting(self, what: str) -> None:
        """Show, on a terminal, what is being waited for, until something else is or `stop` is called."""
        if not self._terminal:
            return
        with self._lock:
            if self._live is None:
                self._live = _live(self._rich())
                self._live.start()
            if self._task is not None:
                self._live.remove_task(self._task)
            self._task = self._live.add_task(what, total=None)

    def uploaded(self, sent_bytes: int, total_bytes: int) -> None:
        """Show how far the upload is; a callback of the upload."""
        with self._lock:
            if self._live is None:
                return
            if self._bar is None:
                self._bar = self._live.add_task("upload", total=total_bytes)
            self._live.update(self._bar, completed=sent_bytes, total=total_bytes)
            if sent_bytes >= total_bytes:
                self._live.remove_task(self._bar)
                self._bar = None

    def stop(self) -> None:
        """Take down what is being waited for."""
        with self._lock:
            live, self._live, self._task, self._bar = self._live, None, None, None
        if live is not None:
            live.stop()

    def _line(self, step: str, message: str, *, style: str = "", bar: bool = False) -> None:
        if not self._terminal:
            _write(f"{step:{_STEP_WIDTH}} {message}")
            return
        from rich.table import Table
        from rich.text import Text

        self.said = True
        # A grid, so that what does not fit goes on below its own column.
        line = Table.grid(padding=(0, 1, 0, 0))
        line.add_column(width=_STEP_WIDTH, no_wrap=True)
        line.add_column(overflow="fold")
        line.add_row(Text(step, "cyan"), Text.assemble(("│ " if bar else "", "dim"), (message, style)))
        self._rich().print(line)

    def _rich(self) -> Console:
        with self._lock:
            if self._console is None:
                from rich.console import Console

                self._console = Console(stderr=True, highlight=False)
            return self._console


def _live(console: Console) -> Any:
    from rich.progress import BarColumn, DownloadColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    class WhereKnown(BarColumn):
        """A bar for what has an end."""

        def render(self, task: Any) -> Any:
            return "" if task.total is None else super().render(task)

    class BytesWhereKnown(DownloadColumn):
        """Bytes for what has an end."""

        def render(self, task: Any) -> Any:
            return "" if task.total is None else super().render(task)

    return Bars(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        WhereKnown(bar_width=24),
        BytesWhereKnown(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


def _write(line: str) -> None:
    # One write, so that lines of several threads do not mix.
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
