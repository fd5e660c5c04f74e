"""A training as a Prefect block: saved once, triggered from anywhere, followed from another process."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from prefect.blocks.abstract import JobBlock, JobRun
from pydantic import Field

from gpu_flows.errors import GpuFlowsError
from gpu_flows.leases.lease import Owner
from prefect_blocks.accounts import find_secret, open_installation
from prefect_blocks.credentials import DOCUMENTATION
from prefect_blocks.ledger import Entry
from prefect_blocks.telling import Courier


class TrainingNotStarted(GpuFlowsError):
    """The training of a block did not begin; nothing is left running."""

    code = "NOT_STARTED"


class GpuTrainingRun(JobRun[dict[str, Any]]):
    """One run of a `GpuTraining`: whoever knows its owner follows it, in any process that has the credentials.

    Args:
        owner: Who answers for the boxes.
        clouds: Where they are.
    """

    def __init__(self, owner: Owner, clouds: tuple[str, ...]) -> None:
        self.owner = owner
        self.clouds = clouds
        self._report: Any = None

    def to_json(self) -> dict[str, Any]:
        """Return what another process re-attaches by: plain JSON, without a secret."""
        return {"owner": list(self.owner.parts), "clouds": list(self.clouds)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GpuTrainingRun:
        """Return the run that `to_json` told of."""
        return cls(Owner(tuple(data["owner"])), tuple(data["clouds"]))

    def wait_for_completion(self) -> None:  # type: ignore[override]  # Prefect's is async; theirs are dispatched too
        """Follow the training to its end, fetch its outputs, and give the boxes back.

        Raises:
            BadRequest: When there is nothing to follow any more.
        """
        from gpu_flows.runs.launching import attach
        from gpu_flows.runs.run import Following

        if self._report is not None:
            return
        with (
            Courier(self.logger) as courier,
            open_installation(self.clouds, listener=courier.listen) as here,
        ):
            following = Following(show_line=courier.show, find_secret=find_secret)
            self._report = attach(
                self.owner, installation=here, clouds=self.clouds, following=following, ends=True
            )

    def fetch_result(self) -> dict[str, Any]:  # type: ignore[override]  # likewise
        """Return the report of the training; waits for its end if need be.

        Raises:
            TrainingError: The one that is named after the cause, when it did not end well.
        """
        from prefect_blocks.tasks import checked

        self.wait_for_completion()
        return checked(self._report)

    def cancel(self) -> dict[str, Any]:
        """End the training by ending its boxes, and prove it; also when it has ended already.

        Raises:
            TeardownFailed: When it cannot be proven that all is gone.
        """
        from gpu_flows.runs.steps import teardown_box

        with (
            Courier(self.logger) as courier,
            open_installation(self.clouds, listener=courier.listen) as here,
        ):
            return teardown_box(self.owner, installation=here, clouds=self.clouds).to_json()

    async def await_for_completion(self) -> None:
        """Do what `wait_for_completion` does, without blocking the event loop."""
        await asyncio.to_thread(self.wait_for_completion)

    async def afetch_result(self) -> dict[str, Any]:
        """Do what `fetch_result` does, without blocking the event loop."""
        return await asyncio.to_thread(self.fetch_result)

    async def acancel(self) -> dict[str, Any]:
        """Do what `cancel` does, without blocking the event loop."""
        return await asyncio.to_thread(self.cancel)


class GpuTraining(JobBlock[dict[str, Any]]):
    """A training on rented GPUs: what to run, and what to rent for it.

    Example:
        ```python
        from prefect_blocks import GpuTraining

        training = GpuTraining.load("BLOCK_NAME")
        report = training.trigger().fetch_result()
        ```
    """

    _block_type_name = "gpu-flows training"
    _block_type_slug = "gpu-flows-training"
    _documentation_url: ClassVar[Any] = DOCUMENTATION

    entrypoint: str = Field(description="A Python file, a shell file, or -m and a module.")
    code: str | None = Field(
        default=None, description="Folder to upload, the entrypoint's own if empty; where the flow runs."
    )
    args: list[str] = Field(default_factory=list, description="Arguments of the script.")
    env: dict[str, str] = Field(
        default_factory=dict, description="Environment variables, none of them secret."
    )
    secrets: list[str] = Field(
        default_factory=list, description="Names of variables or Secret blocks whose values the job gets."
    )
    setup: list[str] = Field(default_factory=list, description="Commands before the start.")
    outputs: list[str] = Field(default_factory=list, description="Globs of files to fetch.")
    gpus: list[str] = Field(
        default_factory=lambda: ["cpu"], title="GPUs", description="Requests in order of preference."
    )
    clouds: list[str] = Field(
        default_factory=list,
        description="Where to rent: runpod, or runpod@prod for its block of credentials.",
    )
    nodes: int = Field(default=1, ge=1, le=99, description="Number of boxes.")
    price_cap: float | None = Field(default=None, ge=0, description="Dollars per hour for one whole box.")
    max_duration: str = Field(default="24h", description="Longest time of the job, such as 6h or 1d12h.")
    spot: Literal["never", "prefer", "only"] = Field(
        default="never", description="Whether boxes that may be interrupted are wanted."
    )

    def trigger(self, key: str = "0") -> GpuTrainingRun:  # type: ignore[override]  # Prefect's is async
        """Rent the boxes and start the training; returns as soon as it runs.

        The boxes outlive this process: they end with `GpuTrainingRun.wait_for_completion` or ``cancel``, with the
        hooks of a flow run that was cancelled, crashed or failed, or at the deadline that ``max_duration`` sets.

        Args:
            key: Tells runs of this block apart in the name of the lease.

        Raises:
            BadRequest: When something is wrong with what was asked; nothing was rented.
            TrainingNotStarted: When no box could be had, or the training did not begin.
        """
        from gpu_flows.runs.rental import rental
        from gpu_flows.runs.run import Following
        from gpu_flows.runs.run import run as run_training

        # Not the flow run's id: the training may outlive the run that triggered it.
        owner = Owner(("prefect", str(uuid.uuid4()), _name(self._block_document_name), key))
        parameters: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                *("code", "args", "env", "secrets", "setup", "outputs", "nodes", "max_duration"),
                *("price_cap", "spot"),
            )
        }
        clouds = self.clouds or None
        with (
            Courier(self.logger) as courier,
            open_installation(self.clouds, listener=courier.listen) as here,
        ):
            wanted = rental(self.gpus, settings=here.settings, clouds=clouds)
            _write_down(Entry(owner, here.namespace(wanted.clouds), wanted.clouds), courier)
            report = run_training(
                self.entrypoint,
                gpus=self.gpus,
                name=owner,
                installation=here,
                # Nobody need follow it: its deadline alone ends a training that was forgotten.
                following=Following(
                    detach=True, heartbeat_timeout_s=None, show_line=courier.show, find_secret=find_secret
                ),
                clouds=clouds,
                **parameters,
            )
        if not report.detached:
            left = f"; may be left: {'; '.join(report.left)}" if report.left else ""
            raise TrainingNotStarted(f"{report.sentence}{left}")
        return GpuTrainingRun(owner, wanted.clouds)

    async def atrigger(self, key: str = "0") -> GpuTrainingRun:
        """Do what `trigger` does, without blocking the event loop."""
        return await asyncio.to_thread(self.trigger, key)


def _write_down(entry: Entry, courier: Courier) -> None:
    """Write the lease on the flow run, if there is one, for its hooks."""
    from prefect.runtime import flow_run

    from prefect_blocks.boxes import write_down

    if flow_run.id:
        write_down(entry, courier)


def _name(document: str | None) -> str:
    return re.sub(r"[^a-z0-9-]+", "-", (document or "training").lower())


__all__ = ("GpuTraining", "GpuTrainingRun", "TrainingNotStarted")
