"""What happens, told to Prefect: log records, events, and a progress artifact.

A remote job may write thousands of lines a second, and Prefect takes hundreds of records: lines are gathered
into one record for each 20 KB, or each second or two. Everything goes through one thread, so that neither a
slow server nor the event loop of the connections is waited for.
"""

from __future__ import annotations

import contextvars
import logging
import queue
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from gpu_flows.progress import Progress

RECORD_BYTES = 20_000
"""A record is sent once it holds as much; Prefect Cloud cuts them at 25,000 characters."""
RECORD_S = 1.0
"""A line waits no longer than this for others."""
PROGRESS_S = 10.0
"""An artifact is updated no more often than this."""

EVENTS = {
    "box.rented": "gpu-flows.box.rented",
    "box.ready": "gpu-flows.box.ready",
    "box.gone": "gpu-flows.box.destroyed",
    "teardown.failed": "gpu-flows.box.leaked",
}
"""The events that gpu-flows emits, by what happened."""

_STAGES = {
    "box.rented": 10.0,
    "box.adopted": 20.0,
    "box.ready": 25.0,
    "code.uploaded": 35.0,
    "job.started": 40.0,
    "job.reattached": 40.0,
    "phase.began outputs": 90.0,
    "phase.began teardown": 95.0,
}
_WORRYING = re.compile(
    r"\.(failed|unwritable|unreadable|silent|lost|unkillable|missing|unknown|unlisted|ambiguous)$"
)
_END = object()


class Courier:
    """Carries what happens to Prefect.

    Args:
        logger: Of the flow run or the task run.
        progress_key: Key of the progress artifact; None for none.
    """

    def __init__(self, logger: Any, *, progress_key: str | None = None) -> None:
        self._logger = logger
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lines = _Lines()
        self._lock = threading.Lock()
        self._progress = _ProgressArtifact(progress_key) if progress_key else None
        self._clouds: dict[str, str] = {}
        # The thread writes for the run that started it.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._carry,), name="gpu-flows-courier", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, timeout_s: float = 10) -> None:
        """Send what is left; a server that does not answer is not waited for any longer than this."""
        self._put(_END)
        self._thread.join(timeout_s)

    def show(self, label: str, line: str) -> None:
        """Show a line of a job: rank 0 and the first node for people, the others for those who look closer.

        Args:
            label: ``rank 0`` or ``node 1``.
            line: Without its end.
        """
        # Gathered by the caller: a thread that took each line would fight over the interpreter with the loop that
        # receives them.
        with self._lock:
            if (full := self._lines.add(label, line)) is not None:
                self._queue.put(full)

    def listen(self, progress: Progress) -> None:
        """Tell what happened; a `gpu_flows.progress.Listener`."""
        self._put(progress)

    def do(self, what: str, call: Callable[[], object]) -> None:
        """Let the thread do something, such as making an artifact; a failure is a warning and no more.

        Args:
            what: What is being done, for the warning.
            call: Does it.
        """
        self._put((what, call))

    def _put(self, item: Any) -> None:
        """Queue something behind the lines that came before it."""
        with self._lock:
            if (gathered := self._lines.take()) is not None:
                self._queue.put(gathered)
            self._queue.put(item)

    def _carry(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=RECORD_S)
            except queue.Empty:
                item = None
            with self._lock:
                if self._lines.age_s() >= RECORD_S and (gathered := self._lines.take()) is not None:
                    self._queue.put(gathered)
            match item:
                case None:
                    pass
                case _Record():
                    self._write(item)
                case Progress():
                    self._tell(item)
                case (what, call):
                    self._attempt(what, call)
                case _:
                    if self._progress is not None:
                        self._attempt("the progress", self._progress.finish)
                    return

    def _write(self, record: _Record) -> None:
        first = record.label in ("rank 0", "node 0")
        prefix = "" if first else f"[{record.label}] "
        self._logger.log(logging.INFO if first else logging.DEBUG, "%s%s", prefix, record.text)

    def _tell(self, progress: Progress) -> None:
        if progress.message:
            worrying = _WORRYING.search(progress.kind) is not None
            self._logger.log(logging.WARNING if worrying else logging.INFO, progress.message)
        if progress.kind in EVENTS:
            self._attempt("an event", lambda: self._emit(progress))
        if self._progress is not None:
            began = f"{progress.kind} {progress.step}"
            stage = _STAGES.get(began if progress.kind == "phase.began" else progress.kind)
            if stage is not None:
                text = progress.message or progress.step
                artifact = self._progress
                self._attempt("the progress", lambda: artifact.advance(stage, text))

    def _emit(self, progress: Progress) -> None:
        from prefect.events import emit_event

        box = str(progress.data.get("id") or "unknown")
        cloud = self._clouds.setdefault(box, str(progress.data.get("cloud") or "unknown"))
        emit_event(
            EVENTS[progress.kind],
            resource={
                "prefect.resource.id": f"gpu-flows.box.{cloud}.{box}",
                "prefect.resource.name": f"{cloud} {box}",
            },
            payload={"message": progress.message, **progress.data},
        )

    def _attempt(self, what: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - said; showing things must not end a training
            self._logger.warning("%s could not be shown: %s", what, error)


@dataclass(frozen=True, slots=True)
class _Record:
    """Lines that go to Prefect as one."""

    label: str
    text: str


class _Lines:
    """Gathers the lines of one label into a record."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._label = ""
        self._size = 0
        self._since = 0.0

    def add(self, label: str, line: str) -> _Record | None:
        """Take a line; return the record that it no longer fits into."""
        full = None
        if self._lines and (label != self._label or self._size + len(line) >= RECORD_BYTES):
            full = self.take()
        if not self._lines:
            self._label, self._since = label, time.monotonic()
        self._lines.append(line)
        self._size += len(line) + 1
        return full

    def age_s(self) -> float:
        """Return how long the oldest line has waited; 0 when there is none."""
        return time.monotonic() - self._since if self._lines else 0.0

    def take(self) -> _Record | None:
        """Return what is gathered so far; None when that is nothing."""
        if not self._lines:
            return None
        record = _Record(self._label, "\n".join(self._lines))
        self._lines, self._size = [], 0
        return record


class _ProgressArtifact:
    """One bar in the UI; it only grows."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._id: Any = None
        self._percent, self._text = 0.0, ""
        self._told_at = 0.0

    def advance(self, percent: float, text: str) -> None:
        if percent < self._percent:
            return
        self._percent, self._text = percent, text
        if self._id is None or time.monotonic() - self._told_at >= PROGRESS_S:
            self._send()

    def finish(self) -> None:
        if self._id is not None:
            self._percent = 100.0
            self._send()

    def _send(self) -> None:
        from prefect import artifacts

        self._told_at = time.monotonic()
        # In the context of an async flow they would return coroutines that nobody awaits.
        create: Any = artifacts.create_progress_artifact
        update: Any = artifacts.update_progress_artifact
        if self._id is None:
            self._id = create(self._percent, key=self._key, description=self._text, _sync=True)
        else:
            update(self._id, self._percent, description=self._text, _sync=True)


def artifact_key(*parts: str) -> str:
    """Return a key as Prefect wants it: lower case, digits and dashes."""
    words = re.sub(r"[^a-z0-9]+", "-", " ".join(part for part in parts if part and part != "0").lower())
    return f"gpu-flows-{words.strip('-')}"


__all__ = ("EVENTS", "Courier", "artifact_key")
