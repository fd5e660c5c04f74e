"""What a job is, kept in its folder on the box: whoever finds the box can follow the job to its end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from gpu_flows.errors import BadRequest
from gpu_flows.training.spec import TrainingSpec

if TYPE_CHECKING:
    from gpu_flows.remote.ssh import RemoteBox

MEMO = "job.json"
"""File in the job's folder; it holds no secret, but the values of ``env``, which are there anyway."""

_READ = 'cat "$HOME/.gpu-flows/jobs/$1/$2"'
_LONG_AGO = datetime.fromtimestamp(0, UTC)


class NoJob(BadRequest):
    """The box was never given a job."""

    code = "NO_JOB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memo:
    """What a job is.

    Attributes:
        job_id: Its id.
        spec: What runs.
        key: The key that it was launched with.
        nproc: Processes on each node.
    """

    job_id: str
    spec: TrainingSpec
    key: str
    nproc: int


def written_memo(spec: TrainingSpec, *, key: str, nproc: int) -> bytes:
    """Return the file that says what a job is."""
    data = spec.to_json()
    if spec.outputs_to is not None:
        # Whoever reads it may stand elsewhere.
        data["outputs_to"] = str(spec.outputs_to.absolute())
    return json.dumps({"spec": data, "key": key, "nproc": nproc}).encode()


async def last_job(box: RemoteBox, *, timeout_s: float) -> Memo:
    """Return the job that was started last on a box.

    Args:
        box: The box of node 0.
        timeout_s: For each question.

    Raises:
        NoJob: When none was.
        SshError: When the box cannot be asked.
    """
    from gpu_flows.remote.jobs import list_jobs

    jobs = await list_jobs(box, timeout_s=timeout_s)
    if not jobs:
        raise NoJob(f"no job was started on {box.endpoint.host}", hint="gpu-flows launch starts one")
    job = max(jobs, key=lambda status: status.started_at or _LONG_AGO)
    try:
        data = json.loads(await box.script(_READ, job.job_id, MEMO, timeout_s=timeout_s))
        spec = TrainingSpec(**data["spec"])
        return Memo(job_id=job.job_id, spec=spec, key=data["key"], nproc=data["nproc"])
    except (ValueError, KeyError, TypeError) as error:
        raise NoJob(f"what job {job.job_id} is cannot be read on its box: {error}") from error
