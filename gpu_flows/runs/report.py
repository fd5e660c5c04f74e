"""What a run did, took and cost: as JSON for machines, and as tables for people."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from gpu_flows.leases.cost import NOTHING, Cost
from gpu_flows.leases.ending import EndedBox
from gpu_flows.leases.lease import Lease, Owner
from gpu_flows.leases.provision import Attempt

if TYPE_CHECKING:
    from rich.console import RenderableType


_OUTPUTS_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """How one node ended.

    Attributes:
        node: Index of the node.
        box: ``cloud`` (or ``cloud@account``) and id of its box.
        cause: How its job ended, as a value of `ExitCause`; ``stopped`` where another node failed first.
        exit_code: Exit code of its job; None where nobody knows.
        ranks: Exit code of each global rank that ran there; None for one that left no record.
    """

    node: int
    box: str
    cause: str
    exit_code: int | None
    ranks: Mapping[int, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The whole of a run.

    Attributes:
        owner: Who answered for the boxes.
        lease: The lease id.
        namespace: The installation.
        request: What was asked for.
        cause: How it ended, as a value of `ExitCause`, or the code of the error that kept it from starting.
        sentence: The same for people.
        exit_code: Exit code of the first failing rank; 0 for a success, None where there is none.
        traceback: The first failing rank's own traceback, where it wrote one.
        attempts: Every offer that was walked.
        preemptions: How often boxes were taken away and the run went on elsewhere.
        boxes: What was rented: the last lease.
        usd_per_hour: Dollars per hour for all boxes together, as billed.
        started_at: When the run began, aware.
        seconds: Length of each phase, in the order in which they ran.
        nodes: How each node ended.
        outputs: Files that were fetched.
        not_fetched: Globs that matched nothing, and paths that lie outside, each with the reason.
        folder: Where logs and outputs lie on this machine.
        cost: What all boxes of the lease have cost, those of failed attempts included.
        ended: The boxes that the teardown ended, proven.
        left: What could not be proven to be gone; empty is the promise kept.
        detached: Whether the boxes were left running on purpose.
    """

    owner: Owner
    lease: str
    namespace: str
    request: str
    cause: str
    sentence: str
    exit_code: int | None = None
    traceback: str = ""
    attempts: Sequence[Attempt] = ()
    preemptions: int = 0
    boxes: Lease | None = None
    usd_per_hour: float = 0.0
    started_at: datetime
    seconds: Mapping[str, float] = field(default_factory=dict)
    nodes: Sequence[NodeReport] = ()
    outputs: Sequence[str] = ()
    not_fetched: Sequence[str] = ()
    folder: str = ""
    cost: Cost = NOTHING
    ended: Sequence[EndedBox] = ()
    left: Sequence[str] = ()
    detached: bool = False

    @property
    def ok(self) -> bool:
        """Whether the training succeeded and nothing is left."""
        return self.cause == "succeeded" and not self.left

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values; it holds no secret."""
        return {
            "ok": self.ok,
            "owner": list(self.owner.parts),
            "lease": self.lease,
            "namespace": self.namespace,
            "request": self.request,
            "cause": self.cause,
            "sentence": self.sentence,
            "exit_code": self.exit_code,
            "traceback": self.traceback,
            "attempts": [dataclasses.asdict(attempt) for attempt in self.attempts],
            "preemptions": self.preemptions,
            "boxes": self.boxes.to_json()["boxes"] if self.boxes else [],
            "usd_per_hour": self.usd_per_hour,
            "started_at": self.started_at.isoformat(),
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "nodes": [
                {**dataclasses.asdict(node), "ranks": {str(rank): code for rank, code in node.ranks.items()}}
                for node in self.nodes
            ],
            "outputs": list(self.outputs),
            "not_fetched": list(self.not_fetched),
            "folder": self.folder,
            "cost": self.cost.to_json(),
            "ended": [box.to_json() for box in self.ended],
            "left": list(self.left),
            "detached": self.detached,
        }

    def __rich__(self) -> RenderableType:
        """Return the report as tables for a terminal."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        style = "green" if self.ok else "red"
        title = Text.assemble((self.cause.replace("_", " "), f"bold {style}"), "  ", Text(self.sentence))
        facts = Table.grid(padding=(0, 2))
        facts.add_column(style="dim")
        facts.add_column()
        for name, value in self._facts():
            facts.add_row(name, Text(value))
        parts: list[RenderableType] = [title, facts]
        if any(attempt.tried and attempt.code != "OK" for attempt in self.attempts):
            parts.append(self._offers_walked())
        if self.traceback:
            parts.append(Text(self.traceback, style="red"))
        return Group(*parts)

    def _facts(self) -> list[tuple[str, str]]:
        rented = self.boxes.boxes if self.boxes else ()
        shapes = sorted({f"{b.box.cloud} {b.offer.instance_type if b.offer else ''}".strip() for b in rented})
        phases = ", ".join(f"{name} {value:.1f}" for name, value in self.seconds.items())
        took = f"{sum(self.seconds.values()):.1f} s: {phases}" if phases else ""
        facts = [
            ("asked for", self.request),
            (
                "rented",
                f"{len(rented)} x {', '.join(shapes)}, ${self.usd_per_hour:.2f}/h" if rented else "nothing",
            ),
            ("took", took),
            ("cost", str(self.cost) if rented or self.ended else ""),
            ("boxes", self._proof()),
            ("outputs", _in_short(self.outputs)),
            ("not fetched", "; ".join(self.not_fetched)),
            ("logs", self.folder if rented else ""),
        ]
        return [(name, value) for name, value in facts if value]

    def _proof(self) -> str:
        """Return what is known about the ends of the boxes."""
        if self.left:
            return "; ".join(self.left)
        if self.detached:
            deadline = self.boxes.deadline if self.boxes else None
            until = f", at most until {deadline:%Y-%m-%d %H:%M} UTC" if deadline else ""
            return f"left running on purpose{until}"
        return f"{len(self.ended)} ended and proven gone" if self.boxes or self.ended else ""

    def _offers_walked(self) -> RenderableType:
        from rich.table import Table

        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
        for column in ("offer", "region", "type", "$/h", "result"):
            table.add_column(column, overflow="fold")
        for attempt in self.attempts:
            result = attempt.code if attempt.code == "OK" else f"{attempt.code}: {attempt.reason}"
            table.add_row(
                attempt.cloud, attempt.region, attempt.instance_type, f"{attempt.usd_per_hour:.2f}", result
            )
        return table


def _in_short(paths: Sequence[str]) -> str:
    """Return the names of files and the folder that they have in common."""
    if not paths:
        return ""
    folder = os.path.commonpath([os.path.dirname(path) for path in paths])
    names = [os.path.relpath(path, folder) for path in paths]
    more = f" and {len(names) - _OUTPUTS_SHOWN} more" if len(names) > _OUTPUTS_SHOWN else ""
    return f"{', '.join(names[:_OUTPUTS_SHOWN])}{more} in {folder}"
