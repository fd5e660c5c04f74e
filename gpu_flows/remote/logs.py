"""Following the logs of a job: every byte once, over any number of lost connections.

The box sends frames that carry their length, so both sides count raw bytes: after a lost connection the next one
begins at the byte where the last one broke. All logs of a box share one channel (stock sshd allows ten sessions,
and eight ranks have nine logs). The end is announced only when the job is over and every log is sent.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from pathlib import PurePosixPath

from gpu_flows.errors import BadRequest, DeadlineExceeded
from gpu_flows.remote.errors import RemoteScriptFailed, RemoteTimeout, SshDropped, SshError
from gpu_flows.remote.jobs import JobStatus, checked_id, parse_status, script
from gpu_flows.remote.lines import LineStream
from gpu_flows.remote.masking import Masker
from gpu_flows.remote.persist import persistently
from gpu_flows.remote.rawlog import RawLog
from gpu_flows.remote.ssh import RemoteBox

__all__ = ["LineStream", "Masker", "RawLog", "follow", "follow_all", "log_sha256"]

Sink = Callable[[bytes], None]

FRAME_BYTES = 8 << 20
"""At most so much of one log before the next one gets its turn."""

_SILENCE_S = 60.0
"""The box says something every five seconds; a dead connection is noticed by its keepalive long before this."""
_FAILURES_IN_A_ROW = 8
"""A script that fails so often without sending a byte will not work the next time either."""


async def follow(
    box: RemoteBox,
    job_id: str,
    sink: Sink,
    *,
    log: str = "log",
    offset: int = 0,
    deadline_s: float,
    on_drop: Callable[[SshError], None] | None = None,
    pace_s: float = 0.3,
) -> JobStatus:
    """Follow one log of a job until the job has ended and the log is drained.

    Args:
        box: Where the job runs.
        job_id: Its id.
        sink: Gets every byte from `offset` on once and in order, in chunks of up to 256 KiB.
        log: A path in the job's folder, such as ``ranks/0.log``; the file may come to exist later, or never.
        offset: The first byte to send.
        deadline_s: For all of it.
        on_drop: Told of each failure before the next attempt.
        pace_s: Between looks at a log that does not fill a whole frame.

    Returns:
        The job as it was when its end was seen.

    Raises:
        DeadlineExceeded: When the job goes on for longer.
        SshError: When waiting does not cure it, such as a changed host key.
    """
    return await follow_all(
        box,
        job_id,
        {log: sink},
        offsets={log: offset},
        deadline_s=deadline_s,
        on_drop=on_drop,
        pace_s=pace_s,
    )


async def follow_all(
    box: RemoteBox,
    job_id: str,
    sinks: Mapping[str, Sink],
    *,
    offsets: Mapping[str, int] | None = None,
    deadline_s: float,
    on_drop: Callable[[SshError], None] | None = None,
    pace_s: float = 0.3,
) -> JobStatus:
    """Follow several logs of a job at once, over one channel; otherwise as `follow`.

    Args:
        box: Where the job runs.
        job_id: Its id.
        sinks: What takes each log's bytes, by its path in the job's folder.
        offsets: The first byte of each log; 0 where none is given.
        deadline_s: For all of it.
        on_drop: Told of each failure before the next attempt.
        pace_s: Between looks at logs that do not fill a whole frame.

    Returns:
        The job as it was when its end was seen.

    Raises:
        DeadlineExceeded: When the job goes on for longer.
        SshError: When waiting does not cure it.
    """
    checked_id(job_id)
    logs = [_checked_log(log) for log in sinks]
    reached = {log: (offsets or {}).get(log, 0) for log in logs}
    loop = asyncio.get_running_loop()
    deadline = loop.time() + deadline_s
    failures = 0
    while True:
        frames = _Frames()
        try:
            received = _received(box, job_id, reached, frames, deadline - loop.time(), pace_s)
            async with aclosing(received):
                async for index, data in received:
                    sinks[logs[index]](data)
                    reached[logs[index]] += len(data)
            status = frames.status()
            if reached.get("log", status.log_bytes) >= status.log_bytes:
                return status
            raise SshDropped(f"the log of job {job_id} ended at byte {reached['log']} of {status.log_bytes}")
        except SshError as exc:
            if isinstance(exc, RemoteTimeout) or loop.time() >= deadline:
                raise DeadlineExceeded(
                    f"job {job_id} had not ended after {deadline_s:g} s of following its log"
                ) from exc
            failures = 1 if frames.seen else failures + 1
            if not (exc.retryable or (isinstance(exc, RemoteScriptFailed) and failures < _FAILURES_IN_A_ROW)):
                raise
            if on_drop is not None:
                on_drop(exc)
        await asyncio.sleep(min(_pause_s(failures), max(0.0, deadline - loop.time())))


async def _received(
    box: RemoteBox, job_id: str, reached: Mapping[str, int], frames: _Frames, left_s: float, pace_s: float
) -> AsyncGenerator[tuple[int, bytes], None]:
    positions = [word for log, offset in reached.items() for word in (log, str(offset))]
    stream = box.stream(
        script("follow"),
        job_id,
        f"{pace_s:g}",
        str(FRAME_BYTES),
        *positions,
        timeout_s=max(0.1, left_s),
    )
    async with aclosing(stream):
        while True:
            try:
                async with asyncio.timeout(_SILENCE_S):
                    chunk = await anext(stream)
            except StopAsyncIteration:
                return
            except TimeoutError as exc:
                if isinstance(exc, SshError):
                    raise
                raise SshDropped(
                    f"the follower of job {job_id} has said nothing for {_SILENCE_S:g} s"
                ) from exc
            for frame in frames.feed(chunk):
                yield frame


class _Frames:
    """Takes apart what ``follow.sh`` sends.

    Attributes:
        seen: Whether anything has come.
    """

    def __init__(self) -> None:
        self.seen = False
        self._index = 0
        self._left = 0  # bytes that the current frame still holds
        self._head = b""  # a header that is not complete
        self._tail: bytearray | None = None  # what follows the end

    def feed(self, chunk: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield (index of the log, its bytes) for what a chunk holds."""
        self.seen = True
        at = 0
        while at < len(chunk):
            if self._tail is not None:
                self._tail += chunk[at:]
                return
            if self._left:
                data = chunk[at : at + self._left]
                self._left -= len(data)
                at += len(data)
                yield self._index, data
                continue
            end = chunk.find(b"\n", at)
            if end < 0:
                self._head += chunk[at:]
                return
            self._take_header(self._head + chunk[at:end])
            self._head = b""
            at = end + 1

    def _take_header(self, header: bytes) -> None:
        match header.split():
            case [b"data", index, length]:
                self._index, self._left = int(index), int(length)
            case [b"beat"]:
                pass
            case [b"end"]:
                self._tail = bytearray()
            case _:
                # A log that shrank while it was sent: the frame came out too short.
                raise SshDropped(f"what the box sends cannot be understood: {header[:80]!r}")

    def status(self) -> JobStatus:
        """Return the job as described at the end.

        Raises:
            SshDropped: When the stream broke off before.
        """
        if self._tail is None or not self._tail.endswith(b"\n"):
            raise SshDropped("the box stopped sending before the end of the log")
        return parse_status(self._tail.decode(errors="replace").strip())


async def log_sha256(
    box: RemoteBox, job_id: str, *, log: str = "log", start: int = 0, end: int, timeout_s: float
) -> str:
    """Return the sha256 of a range of a log's bytes as the box has them, to compare with what was received.

    Args:
        box: Where the log is.
        job_id: Of its job.
        log: A path in the job's folder.
        start: The first byte.
        end: The byte behind the last.
        timeout_s: For all of it.

    Raises:
        SshError: When the box cannot be asked in time.
    """
    checked_id(job_id)
    text = script("common") + '\ntail -c "+$(($3 + 1))" "$jobs/$1/$2" | head -c "$4" | sha256sum'
    args = (job_id, _checked_log(log), str(start), str(end - start))
    reply = await persistently(lambda left_s: box.script(text, *args, timeout_s=left_s), timeout_s=timeout_s)
    return reply.split()[0].decode()


def _checked_log(log: str) -> str:
    path = PurePosixPath(log)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in log:
        raise BadRequest(f"{log!r} is no path inside a job's folder")
    return log


def _pause_s(failures: int) -> float:
    """Wait 0.25 s at first and 10 s at most, with jitter: many followers lose a box at the same moment."""
    return min(10.0, 0.25 * 2.0 ** (failures - 1)) * random.uniform(0.5, 1.5)  # noqa: S311 - spreads load
