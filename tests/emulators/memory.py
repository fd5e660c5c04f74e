"""A cloud in memory that fails in every way that a cloud was seen to fail, and keeps the book of its boxes."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime

from gpu_flows.clouds.base import Box, BoxSpec, BoxState, Capabilities
from gpu_flows.clouds.errors import (
    AuthenticationFailed,
    CapacityUnavailable,
    CloudUnreachable,
    UnexpectedAnswer,
)
from gpu_flows.endpoint import SshEndpoint
from gpu_flows.gpus.request import GpuRequest
from gpu_flows.offers import Offer, OfferQuery

from .clock import FakeClock


@dataclass
class Record:
    """One line of the cloud's own book."""

    box: Box
    born_at_poll: int
    spec: BoxSpec | None = None
    ended_at: datetime | None = None
    deletes: int = 0
    foreign: bool = False


@dataclass
class Faults:
    """The knobs. Lists are used up one by one; an empty one means that all is well."""

    create: deque[str] = field(default_factory=deque)
    """ok, no_capacity, unreachable_before, unreachable_after, nonsense_after, crash_after, id_in_error,
    dearer, late_capacity, no_address, twice, denied, fewer_gpus, unnamed_after, unnameable"""
    find: deque[str] = field(default_factory=deque)
    """ok, unexpected, unreachable, denied"""
    describe: deque[str] = field(default_factory=deque)
    destroy: deque[str] = field(default_factory=deque)
    """ok, fails, ignored"""
    list_lag_polls: int = 0


class MemoryCloud:
    """One account of an invented cloud."""

    def __init__(
        self,
        clock: FakeClock,
        name: str = "memory",
        *,
        account: str = "default",
        capabilities: Capabilities | None = None,
        tells_end: bool = True,
        skew_s: float | None = 0.0,
    ) -> None:
        self.name, self.account, self.clock = name, account, clock
        self.capabilities = capabilities or Capabilities(
            multi_node=True, cpu=True, lag_s=60, ready_timeout_s=600
        )
        self.faults = Faults()
        self.book: dict[str, Record] = {}
        self.calls: Counter[str] = Counter()
        self.polls = 0
        self.tells_end, self.skew_s = tells_end, skew_s
        self.stock: list[Offer] = []
        self.after_create: Callable[[Box], None] | None = None
        self._ids = itertools.count(1)
        self._lock = threading.RLock()

    # What tests look at

    def live(self) -> list[Record]:
        return [r for r in self.book.values() if r.ended_at is None and not r.foreign]

    def offer(self, **changes: object) -> Offer:
        base = Offer(
            cloud=self.name,
            account=self.account,
            region="r1",
            instance_type="h100x8",
            gpu="H100-80GB",
            gpu_count=8,
            used_count=8,
            vram_gb=80,
            usd_per_hour=20.0,
        )
        return replace(base, **changes)  # type: ignore[arg-type]

    def add(
        self,
        name: str,
        *,
        state: BoxState = BoxState.RUNNING,
        foreign: bool = False,
        usd_per_hour: float = 20.0,
    ) -> Box:
        box = Box(
            cloud=self.name,
            account=self.account,
            id=f"{self.name}-{next(self._ids)}",
            name=name,
            state=state,
            usd_per_hour=usd_per_hour,
            gpu_count=8,
            endpoint=SshEndpoint("192.0.2.1"),
            created_at=self.clock.now(),
        )
        self.book[box.id] = Record(box, born_at_poll=-(10**9), foreign=foreign)
        return box

    # The protocol

    def offers(self, query: OfferQuery) -> list[Offer]:
        self.calls["offers"] += 1
        return list(self.stock)

    def create(self, offer: Offer, spec: BoxSpec) -> Box:
        with self._lock:
            self.calls["create"] += 1
            fault = self.faults.create.popleft() if self.faults.create else "ok"
            match fault:
                case "no_capacity":
                    raise CapacityUnavailable(f"{offer.instance_type} is sold out")
                case "denied":
                    raise AuthenticationFailed("the key is wrong")
                case "unreachable_before":
                    raise CloudUnreachable("timed out")
            box = self._make(offer, spec, fault)
            match fault:
                case "twice":
                    self._make(offer, spec, fault)
                    raise CloudUnreachable("answered 500")
                case "unreachable_after":
                    raise CloudUnreachable("connection reset")
                case "nonsense_after":
                    raise UnexpectedAnswer("<html>")
                case "crash_after":
                    raise KeyError("podId")
                case "id_in_error":
                    raise CapacityUnavailable("bid too low", box_ids=[box.id])
                case "unnamed_after":
                    raise CloudUnreachable("timed out before the box had its name")
                case "unnameable":
                    raise UnexpectedAnswer("no name", ambiguous=False, box_ids=[box.id])
            if self.after_create:
                self.after_create(box)
            return box

    def find(self, name_prefix: str) -> list[Box]:
        with self._lock:
            self.calls["find"] += 1
            self.polls += 1
            self._fail(self.faults.find)
            return [
                record.box
                for record in self.book.values()
                if record.ended_at is None
                and record.box.name.startswith(name_prefix)
                and self.polls - record.born_at_poll > self.faults.list_lag_polls
            ]

    def describe(self, box: Box) -> Box:
        with self._lock:
            self.calls["describe"] += 1
            self._fail(self.faults.describe)
            record = self.book.get(box.id)
            if record is None:
                return replace(box, state=BoxState.GONE)
            if record.ended_at is not None:
                return replace(box, state=BoxState.GONE, ended_at=record.ended_at if self.tells_end else None)
            return record.box

    def destroy(self, box: Box) -> None:
        assert box.id
        with self._lock:
            self.calls["destroy"] += 1
            fault = self.faults.destroy.popleft() if self.faults.destroy else "ok"
            record = self.book.get(box.id)
            if fault == "fails":
                raise CloudUnreachable("delete timed out")
            if record is None:
                return
            assert not record.foreign, f"a foreign box was destroyed: {record.box.name}"
            record.deletes += 1
            if fault != "ignored" and record.ended_at is None:
                record.ended_at = self.clock.now()

    def self_destruct(self, spec: BoxSpec) -> str | None:
        return "halt" if self.capabilities.self_destruct else None

    def clock_skew_s(self) -> float | None:
        return self.skew_s

    def identity_secrets(self) -> tuple[bytes, ...]:
        return (b"secret-of-" + self.name.encode(),)

    def console_url(self, box: Box) -> str | None:
        return f"https://console.invalid/{box.id}"

    def _make(self, offer: Offer, spec: BoxSpec, fault: str) -> Box:
        state = BoxState.FAILED if fault == "late_capacity" else BoxState.RUNNING
        box = Box(
            cloud=self.name,
            account=self.account,
            region=offer.region,
            id=f"{self.name}-{next(self._ids)}",
            name="" if fault.startswith("unname") else spec.name,
            state=state,
            state_reason="insufficient capacity" if fault == "late_capacity" else "",
            usd_per_hour=offer.usd_per_hour * (2 if fault == "dearer" else 1),
            gpu=offer.gpu,
            gpu_count=offer.gpu_count - (1 if fault == "fewer_gpus" else 0),
            endpoint=None if fault in ("late_capacity", "no_address") else SshEndpoint("192.0.2.1"),
            created_at=self.clock.now(),
            details={"owner": spec.owner},
        )
        self.book[box.id] = Record(box, born_at_poll=self.polls, spec=spec)
        return replace(box, state=BoxState.STARTING, state_reason="", endpoint=None)

    @staticmethod
    def _fail(faults: deque[str]) -> None:
        match faults.popleft() if faults else "ok":
            case "unexpected":
                raise UnexpectedAnswer("200 with an error body: deprecated_endpoint")
            case "unreachable":
                raise CloudUnreachable("timed out")
            case "denied":
                raise AuthenticationFailed("401")


def query(gpus: str = "H100:8", nodes: int = 1) -> OfferQuery:
    return OfferQuery(request=GpuRequest.parse(gpus), nodes=nodes)
