"""The logs of one node on this machine: each stored raw but masked, the interesting ones shown as lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from gpu_flows.remote.lines import LineStream
    from gpu_flows.remote.rawlog import RawLog

ShowLine = Callable[[str, str], None]
"""Takes where a line comes from (``rank 0``, ``node 1``) and the line."""

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")

NODE_LOG = "log"
"""What the node's own processes write: the setup, the launcher."""


def show_nothing(_: str, __: str) -> None:
    """Show nothing."""


def local_logs(folder: Path, job_id: str, box_id: str) -> Path:
    """Return the folder of a job's logs on this machine.

    The box is part of its name: the same job on another box, after a preemption or on the next day, is another
    log, and must not be taken for the continuation of this one.

    Args:
        folder: Folder of the run.
        job_id: The job.
        box_id: The box of its first node.
    """
    return folder / "logs" / f"{job_id}@{_NOT_IN_NAMES.sub('_', box_id)}"


class LogBook:
    """Takes the bytes of a node's logs as they come, and goes on where an earlier process stopped.

    Args:
        folder: Folder of the job's logs on this machine; made if need be.
        node: Index of the node.
        ranks: Global ranks that run there.
        secrets: Values to mask.
        show_line: Shown the lines of rank 0, of the launcher, and of the setup.
    """

    def __init__(
        self,
        folder: Path,
        *,
        node: int,
        ranks: Iterable[int],
        secrets: Iterable[str],
        show_line: ShowLine,
    ) -> None:
        from gpu_flows.remote.lines import LineStream
        from gpu_flows.remote.masking import Masker
        from gpu_flows.remote.rawlog import RawLog

        masker = Masker({f"secret {number}": value for number, value in enumerate(secrets)})
        names = {NODE_LOG: f"node-{node}", **{f"ranks/{rank}.log": f"rank-{rank}" for rank in ranks}}
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._show_line = show_line
        self._raw: dict[str, RawLog] = {}
        self._lines: dict[str, tuple[str, LineStream]] = {}
        for log, name in names.items():
            self._raw[log] = RawLog(folder / f"{name}.log", masker)
            # Of eight ranks that print the same, one is enough for a person; the files hold them all.
            if log in (NODE_LOG, "ranks/0.log"):
                self._lines[log] = (name.replace("-", " "), LineStream(masker=masker))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for label, lines in self._lines.values():
            self._show(label, lines.close())
        for raw in self._raw.values():
            if kind is None:
                raw.finish()
            raw.close()

    @property
    def offsets(self) -> Mapping[str, int]:
        """The first byte of each log that is not stored yet."""
        return {log: raw.offset for log, raw in self._raw.items()}

    @property
    def sinks(self) -> Mapping[str, Callable[[bytes], None]]:
        """What takes the bytes of each log."""
        return {log: self._sink(log) for log in self._raw}

    def tick(self) -> None:
        """Show what is due without more data, such as the state of a progress bar."""
        for label, lines in self._lines.values():
            self._show(label, lines.tick())

    def _sink(self, log: str) -> Callable[[bytes], None]:
        raw, shown = self._raw[log], self._lines.get(log)
        if shown is None:
            return raw.write
        label, lines = shown

        def take(data: bytes) -> None:
            raw.write(data)
            self._show(label, lines.feed(data))

        return take

    def _show(self, label: str, lines: Iterable[str]) -> None:
        for line in lines:
            self._show_line(label, line)
