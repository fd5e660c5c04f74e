"""What a run was, as artifacts for people: the offers walked as a table, and a report with its cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu_flows.leases.cost import Cost
from gpu_flows.leases.ending import EndedBox
from gpu_flows.leases.lease import Lease
from gpu_flows.leases.provision import Attempt
from gpu_flows.runs.report import RunReport


def offers_table(attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
    """Return one row for each offer that was walked, with what came of it."""
    return [
        {
            "cloud": attempt.cloud,
            "region": attempt.region,
            "type": attempt.instance_type,
            "GPUs": attempt.gpu or "cpu",
            "usd per hour": round(attempt.usd_per_hour, 4),
            "result": attempt.code,
            "reason": attempt.reason,
            "seconds": round(attempt.seconds, 1),
        }
        for attempt in attempts
    ]


def scope_markdown(
    lease: Lease,
    request: str,
    *,
    jobs: Sequence[RunReport],
    ended: Sequence[EndedBox],
    cost: Cost,
    left: Sequence[str] = (),
) -> str:
    """Return the report of a lease: what was asked for, what ran, what it cost, and that it is gone.

    Args:
        lease: With its boxes.
        request: What was asked for.
        jobs: The trainings that ran on it.
        ended: The boxes that ended, proven.
        cost: Of all boxes of the lease.
        left: What could not be proven to be gone.
    """
    rented = ", ".join(sorted({_shape(leased) for leased in lease.boxes})) or "nothing"
    facts = [
        ("asked for", request),
        ("rented", f"{len(lease.boxes)} x {rented}, ${lease.usd_per_hour:.2f}/h" if lease.boxes else rented),
        ("cost", str(cost)),
        ("boxes", "**not proven gone**" if left else f"{len(ended)} ended and proven gone"),
        ("owner", f"`{lease.owner}`"),
    ]
    parts = ["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in facts)]
    if left:
        parts += ["", "**These may go on billing:**", "", *(f"- {_cell(each)}" for each in left)]
    for job in jobs:
        took = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in job.seconds.items())
        parts += [
            "",
            f"### {job.cause.replace('_', ' ')}",
            "",
            job.sentence,
            "",
            f"Took: {took}. Logs: `{job.folder}`",
        ]
        parts += ["", *(f"- `{path}`" for path in job.outputs)] if job.outputs else []
        parts += ["", "```", job.traceback, "```"] if job.traceback else []
    return "\n".join(parts) + "\n"


def _shape(leased: Any) -> str:
    return f"{leased.box.cloud} {leased.offer.instance_type if leased.offer else ''}".strip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
