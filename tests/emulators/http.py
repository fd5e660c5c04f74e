"""An HTTP server on loopback that stands in for a cloud: its routes, its faults, its book of billed boxes.

Each box may be backed by a real one of the local cloud, so that the whole path runs: boot script, SSH, job,
dead-man. The book says what bills; every test ends with none of ours in it and no foreign box touched.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from gpu_flows.clouds.local.layout import BoxFolder
from gpu_flows.clouds.local.registry import BoxRecord, Registry, loopback_address, new_box_id
from gpu_flows.endpoint import SshEndpoint

HANG_S = 60.0


@dataclass(frozen=True)
class Request:
    """One request as it arrived.

    Attributes:
        method: The HTTP method.
        path: Without the query.
        query: The first value of each name.
        body: The parsed JSON, or None.
        headers: Lower-case names.
        match: What the route's pattern captured.
    """

    method: str
    path: str
    query: Mapping[str, str]
    body: Any
    headers: Mapping[str, str]
    match: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """What is answered; a body that is neither text nor None is sent as JSON."""

    status: int = 200
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


class HangUp(Exception):
    """Close the connection without an answer."""


class Stall(Exception):
    """Hold the connection open and never answer."""


Fault = Callable[[Callable[[], Reply]], Reply]
"""Gets the operation, which it may carry out or not, and says what is answered."""


def instead(status: int, body: Any = None, **headers: str) -> Fault:
    """Answer so, and do nothing."""
    return lambda _: Reply(status, body, headers)


def after(status: int, body: Any = None) -> Fault:
    """Do it, and then answer so all the same."""

    def fault(operation: Callable[[], Reply]) -> Reply:
        operation()
        return Reply(status, body)

    return fault


def hang_up_after(operation: Callable[[], Reply]) -> Reply:
    """Do it, and close the connection without an answer."""
    operation()
    raise HangUp


def stall_after(operation: Callable[[], Reply]) -> Reply:
    """Do it, and never answer."""
    operation()
    raise Stall


def hang_up(_: Callable[[], Reply]) -> Reply:
    """Do nothing, and close the connection."""
    raise HangUp


HTML = instead(200, "<!doctype html><title>Log in</title>")
EMPTY = instead(200, "")


@dataclass
class Row:
    """One line of the cloud's own book.

    Attributes:
        id: The cloud's id.
        name: The name, label or tag it carries.
        usd_per_hour: What it is billed.
        state: The cloud's own word for its state.
        data: Whatever else the cloud keeps.
        foreign: It belongs to somebody else, and must not be touched.
        born_at_poll: How many listings there had been when it was made.
    """

    id: str
    name: str
    usd_per_hour: float = 0.0
    state: str = "running"
    data: dict[str, Any] = field(default_factory=dict)
    foreign: bool = False
    born_at_poll: int = 0
    began_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    ended_at: datetime | None = None
    deletes: int = 0
    local_id: str | None = None


Handler = Callable[[Request], Reply]


class HttpEmulator:
    """A cloud on a free loopback port.

    Subclasses add routes with `route` and keep their boxes in `book`.

    Args:
        backing: Folder for real boxes behind the invented ones; None for boxes that nothing answers.
        skew_s: How far its clock is ahead of ours.

    Attributes:
        faults: By operation, what goes wrong next; used up one by one.
        book: Every box that ever was, by id.
        calls: How often each operation was asked for.
        requests: Every request, in order, the keys in its headers included: look for planted secrets elsewhere.
        list_lag_polls: How many listings do not show a new box yet.
    """

    def __init__(self, backing: Path | None = None, *, skew_s: float = 0.0) -> None:
        self.faults: dict[str, deque[Fault]] = {}
        self.book: dict[str, Row] = {}
        self.calls: Counter[str] = Counter()
        self.requests: list[Request] = []
        self.list_lag_polls = 0
        self.skew_s = skew_s
        self.lock = threading.RLock()
        self.polls = 0
        self._routes: list[tuple[str, re.Pattern[str], str, Handler]] = []
        self._registry = Registry(backing) if backing else None
        self._stopping = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        """Where it listens, without a trailing slash."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
        for row in list(self.book.values()):
            self.end_backing(row)

    # What subclasses use

    def route(self, method: str, pattern: str, operation: str, handler: Handler) -> None:
        """Answer a method and path; the pattern is a regular expression for the whole path."""
        self._routes.append((method, re.compile(pattern), operation, handler))

    def listed(self) -> list[Row]:
        """Count a listing, and return the boxes that it shows: live ones that are old enough."""
        with self.lock:
            self.polls += 1
            return [
                row
                for row in self.book.values()
                if row.ended_at is None and self.polls - row.born_at_poll > self.list_lag_polls
            ]

    def begin(self, row: Row) -> Row:
        """Write a new box into the book: it bills from now on."""
        with self.lock:
            row.born_at_poll = self.polls
            self.book[row.id] = row
        return row

    def end(self, row: Row) -> None:
        """End a box: it bills no more, and what backs it is gone."""
        with self.lock:
            if row.foreign:
                raise AssertionError(f"a foreign box was ended: {row.name}")
            row.deletes += 1
            if row.ended_at is None:
                row.ended_at = datetime.now(UTC)
        # Not within the request: a box that ends itself would kill the process that asks.
        threading.Thread(target=self.end_backing, args=(row,)).start()

    def back(
        self,
        row: Row,
        *,
        public_key: str,
        boot_script: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Make a real box behind an invented one, which runs the boot script as its cloud would."""
        if self._registry is None:
            return
        row.local_id = new_box_id()
        record = BoxRecord(
            id=row.local_id,
            name=row.name,
            owner="",
            created_at=row.began_at.isoformat(),
            deadline=row.began_at.isoformat(),
            address=loopback_address(row.local_id),
            usd_per_hour=row.usd_per_hour,
        )
        self._registry.create(
            record, public_key=public_key, boot_script=boot_script, environment=dict(environment or {})
        )

    def endpoint(self, row: Row) -> SshEndpoint | None:
        """Return where the real box behind an invented one answers, once it does."""
        if self._registry is None or row.local_id is None:
            return None
        return self._registry.state(row.local_id)[2]

    def home(self, row: Row) -> Path | None:
        """Return the home of the real box behind an invented one."""
        if self._registry is None or row.local_id is None:
            return None
        return BoxFolder(self._registry.root / "boxes" / row.local_id).home

    def end_backing(self, row: Row) -> None:
        """End the real box behind an invented one."""
        if self._registry is not None and row.local_id is not None:
            self._registry.end(row.local_id)

    # What tests use

    def fault(self, operation: str, *faults: Fault) -> None:
        """Let the next calls of an operation go wrong in these ways."""
        self.faults.setdefault(operation, deque()).extend(faults)

    def live(self) -> list[Row]:
        """Return what bills, foreign boxes left out."""
        return [row for row in self.book.values() if row.ended_at is None and not row.foreign]

    def foreign(self, name: str, **data: Any) -> Row:
        """Put a box of somebody else into the account."""
        return self.begin(Row(id=f"foreign-{len(self.book)}", name=name, foreign=True, data=data))

    # Answering

    def answer(self, request: Request) -> Reply:
        for method, pattern, operation, handler in self._routes:
            match = pattern.fullmatch(request.path)
            if method != request.method or match is None:
                continue
            with self.lock:
                self.calls[operation] += 1
                waiting = self.faults.get(operation)
                fault = waiting.popleft() if waiting else None
            found = Request(**{**vars(request), "match": match.groupdict()})
            if fault is None:
                return handler(found)
            return fault(partial(handler, found))
        self.calls["unknown"] += 1
        return self.unknown(request)

    def unknown(self, request: Request) -> Reply:
        """Answer what has no route."""
        return Reply(404, {"error": f"no route for {request.method} {request.path}"})

    def wait_stalled(self) -> None:
        self._stopping.wait(HANG_S)

    def now(self) -> datetime:
        """Return the time by the cloud's own clock."""
        return datetime.fromtimestamp(datetime.now(UTC).timestamp() + self.skew_s, UTC)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that gives up on a stalled answer is what some tests are about.
        return


def _handler(emulator: HttpEmulator) -> type[BaseHTTPRequestHandler]:
    class Handle(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Head and body go out in two writes: the second would wait 40 ms for the first one's acknowledgement.
        disable_nagle_algorithm = True

        def _serve(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            raw = self.rfile.read(length) if length else b""
            split = urlsplit(self.path)
            try:
                body = json.loads(raw) if raw else None
            except ValueError:
                body = raw.decode(errors="replace")
            request = Request(
                method=self.command,
                path=split.path,
                query={
                    name: values[0] for name, values in parse_qs(split.query, keep_blank_values=True).items()
                },
                body=body,
                headers={name.lower(): value for name, value in self.headers.items()},
            )
            with emulator.lock:
                emulator.requests.append(request)
            try:
                reply = emulator.answer(request)
            except Stall:
                emulator.wait_stalled()
                self._hang_up()
                return
            except HangUp:
                self._hang_up()
                return
            self._send(reply)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815 - the base class's names

        def _send(self, reply: Reply) -> None:
            is_text = isinstance(reply.body, str)
            data = b"" if reply.body is None else (reply.body if is_text else json.dumps(reply.body)).encode()
            self.send_response_only(reply.status)
            headers = {
                "Date": format_datetime(emulator.now(), usegmt=True),
                "Content-Type": "text/html" if is_text else "application/json",
                "Content-Length": str(len(data)),
                **reply.headers,
            }
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(data)

        def _hang_up(self) -> None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
            return

    return Handle
