"""What is gathered about the work on a lease, on the way to its report."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_flows.errors import GpuFlowsError
from gpu_flows.leases.cost import cost_so_far
from gpu_flows.leases.ending import EndedBox
from gpu_flows.leases.lease import Lease, Owner, lease_id
from gpu_flows.leases.provision import Attempt
from gpu_flows.progress import Progress
from gpu_flows.runs.installation import Installation
from gpu_flows.runs.report import NodeReport, RunReport

if TYPE_CHECKING:
    from gpu_flows.remote.fetch import Fetched
    from gpu_flows.training.launch import JobResult


class Outcome:
    """Gathers; `finish` makes the report of it.

    Args:
        owner: Who answers for the boxes.
        namespace: The installation's namespace.
        request: What was asked for.
        installation: Whose clock, journals and folders.

    Attributes:
        seconds: Length of each phase so far.
        attempts: Every offer that was walked.
        preemptions: How often boxes were taken away and the run went on.
        lease: What was rented.
        result: How the job ended.
        failure: What kept it from starting, or from being followed.
        left: What could not be proven to be gone.
        ended: The boxes that ended, proven.
        detached: Whether the boxes are left running on purpose.
    """

    def __init__(self, owner: Owner, namespace: str, request: str, installation: Installation) -> None:
        self._owner, self._namespace, self._request = owner, namespace, request
        self._here = installation
        self._started_at = installation.clock.now()
        self.seconds: dict[str, float] = {}
        self.attempts: list[Attempt] = []
        self.preemptions = 0
        self.lease: Lease | None = None
        self.result: JobResult | None = None
        self.failure: GpuFlowsError | None = None
        self.left: list[str] = []
        self.ended: list[EndedBox] = []
        self.detached = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Take the time of a phase, and tell that it began."""
        self._here.listener(Progress(name, "phase.began", ""))
        began = time.monotonic()
        try:
            yield
        finally:
            self.took({name: time.monotonic() - began})

    def took(self, seconds: Mapping[str, float]) -> None:
        """Add to the length of phases: after a preemption they run once more."""
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Collect the boxes that end meanwhile; everything is passed on."""
        listener = self._here.listener

        def listen(progress: Progress) -> None:
            if progress.kind == "box.gone":
                self.ended.append(EndedBox.from_json(progress.data))
            listener(progress)

        self._here.listener = listen
        try:
            yield
        finally:
            self._here.listener = listener

    def finish(self) -> RunReport:
        """Return the report, and keep it beside the logs."""
        report = self._report()
        text = json.dumps(report.to_json(), indent=2)
        (Path(report.folder) / "report.json").write_text(text, encoding="utf-8")
        return report

    def _report(self) -> RunReport:
        lease = lease_id(self._owner, self._namespace)
        journal = self._here.journal(self._owner, self._namespace)
        diagnosis = self.result.diagnosis if self.result else None
        if self.failure is not None:
            cause, sentence = self.failure.code, str(self.failure)
        elif diagnosis is None:
            cause, sentence = "running", "the job runs on, detached"
        else:
            cause, sentence = diagnosis.cause.value, diagnosis.sentence
        fetched = self.result.fetched if self.result else None
        return RunReport(
            owner=self._owner,
            lease=lease,
            namespace=self._namespace,
            request=self._request,
            cause=cause,
            sentence=sentence,
            exit_code=diagnosis.exit_code if diagnosis else None,
            traceback=diagnosis.traceback if diagnosis else "",
            attempts=self.attempts,
            preemptions=self.preemptions,
            boxes=self.lease,
            usd_per_hour=self.lease.usd_per_hour if self.lease else 0.0,
            started_at=self._started_at,
            seconds=self.seconds,
            nodes=self._nodes(),
            outputs=[str(file.path) for file in fetched.files] if fetched else (),
            not_fetched=_not_fetched(fetched),
            folder=str(self._here.run_folder(lease)),
            cost=cost_so_far(journal, self._here.clock.now()),
            ended=self.ended,
            left=self.left,
            detached=self.detached,
        )

    def _nodes(self) -> list[NodeReport]:
        if self.result is None or self.lease is None:
            return []
        boxes = {leased.node: leased.box for leased in self.lease.boxes}
        return [
            NodeReport(
                node=evidence.node,
                box=f"{boxes[evidence.node].cloud} {boxes[evidence.node].id}",
                cause=evidence.outcome,
                exit_code=evidence.exit_code,
                ranks={rank.rank: rank.exit_code for rank in evidence.ranks},
            )
            for evidence in self.result.nodes
        ]


def _not_fetched(fetched: Fetched | None) -> list[str]:
    if fetched is None:
        return []
    return [
        *(f"{pattern}: matches nothing" for pattern in fetched.unmatched),
        *(f"{path}: outside of the working directory and the home" for path in fetched.outside),
        *(f"{path}: did not arrive ({fetched.complaint or 'gone meanwhile'})" for path in fetched.failed),
    ]
