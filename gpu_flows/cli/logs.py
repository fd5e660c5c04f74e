"""``logs``: what a job wrote, from its boxes while they live, else from this machine's copies."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_flows.cli.exits import Exit
from gpu_flows.cli.flags import OWNER, WHERE
from gpu_flows.cli.output import Format, Output
from gpu_flows.cli.session import clouds_of, installation, owner_named, shown
from gpu_flows.cli.verbs import Flag, Given, verb
from gpu_flows.errors import BadRequest, GpuFlowsError

if TYPE_CHECKING:
    from gpu_flows.leases.lease import Lease, Owner
    from gpu_flows.remote.masking import Masker
    from gpu_flows.remote.ssh import RemoteBox
    from gpu_flows.runs.installation import Installation

_REACH_TIMEOUT_S, _ASK_TIMEOUT_S, _READ_TIMEOUT_S = 30.0, 60.0, 3600.0
_CHUNK_BYTES = 1 << 18
_SHOW = 'cat "$HOME/.gpu-flows/jobs/$1/$2" 2>/dev/null || :'

Sink = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Source:
    """Where the logs of a job come from.

    Attributes:
        job_id: The job.
        logs: The logs that are wanted, by what they are called for people.
        read: Reads them into their sinks.
        masker: Masks the secrets that are known here.
    """

    job_id: str
    logs: Mapping[str, str]
    read: Callable[[Mapping[str, Sink]], None]
    masker: Masker


@verb(
    [
        OWNER,
        *WHERE,
        Flag("follow", bool, "Go on until the job has ended.", spelled=("--follow", "-f")),
        Flag("rank", int, "Only this rank, byte for byte.", metavar="N"),
        Flag("node", int, "Only what node N itself wrote: its setup and its launcher.", metavar="N"),
    ]
)
def logs(given: Given, output: Output) -> int:
    """Show what the last job of an owner wrote: node 0's setup and launcher, and rank 0.

    From the boxes while they live; afterwards from the copies that a run keeps on this machine. Secrets that are
    known here are masked. Ctrl-C ends only the showing.
    """
    owner = owner_named(given.get("owner"))
    if given.get("follow") and output.format is Format.JSON:
        raise BadRequest("a log that is followed is no JSON document", hint="--format plain")
    if "rank" in given and "node" in given:
        raise BadRequest("--rank or --node, not both")
    raw = "rank" in given or "node" in given
    with installation(output) as here:
        output.screen.waiting("looking for the job")
        lease = _living(owner, here, given, output)
        source = _from_boxes(lease, here, given) if lease else _from_files(owner, here, given)
        try:
            if output.format is Format.JSON:
                _write_document(owner, source, output)
            elif raw:
                _write_bytes(source, output)
            else:
                _write_lines(source, output)
        except KeyboardInterrupt:
            return Exit.INTERRUPTED
    return Exit.OK


def _living(owner: Owner, here: Installation, given: Given, output: Output) -> Lease | None:
    """Return the lease of an owner whose boxes can be asked; None when there are only copies."""
    from gpu_flows.runs.lookup import NoBoxes, find_lease

    try:
        return find_lease(owner, here, clouds=clouds_of(given), inspects=False, timeout_s=_REACH_TIMEOUT_S)
    except NoBoxes:
        return None
    except BadRequest:
        raise
    except GpuFlowsError as error:
        if not _copies(owner, here):
            raise
        output.say(f"{error.message}: showing this machine's copy")
        return None


def _from_boxes(lease: Lease, here: Installation, given: Given) -> Source:
    from gpu_flows.remote.loop import blocking
    from gpu_flows.remote.masking import Masker
    from gpu_flows.training.memo import last_job

    remotes = [here.remote(leased.box, lease.namespace) for leased in lease.boxes]
    job = blocking(last_job(remotes[0], timeout_s=_ASK_TIMEOUT_S))
    ranks = len(remotes) * job.nproc
    node, rank = given.get("node", 0), given.get("rank", 0)
    if not 0 <= node < len(remotes):
        raise BadRequest(f"there is no node {node}: the job runs on nodes 0 to {len(remotes) - 1}")
    if not 0 <= rank < ranks:
        raise BadRequest(f"there is no rank {rank}: the job has ranks 0 to {ranks - 1}")
    if "rank" in given:
        node = rank // job.nproc
    names = {"node": "log", "rank": f"ranks/{rank}.log"}
    secrets = [*job.spec.sensitive_values(), *filter(None, map(os.environ.get, job.spec.secrets.values()))]

    def read(sinks: Mapping[str, Sink]) -> None:
        until = lease.deadline or datetime.now(UTC)
        left_s = max(60.0, (until - datetime.now(UTC)).total_seconds())
        blocking(_read(remotes[node], job.job_id, sinks, follow_s=left_s if given.get("follow") else None))

    return Source(
        job.job_id,
        {f"{what} {node if what == 'node' else rank}": name for what, name in _wanted(names, given).items()},
        read,
        Masker({f"secret {number}": value for number, value in enumerate(secrets)}),
    )


async def _read(box: RemoteBox, job_id: str, sinks: Mapping[str, Sink], *, follow_s: float | None) -> None:
    """Read logs of a box, as far as they go now, or as they come."""
    from gpu_flows.remote.logs import follow_all

    if follow_s is not None:
        await follow_all(box, job_id, sinks, deadline_s=follow_s)
        return
    for log, sink in sinks.items():
        async with aclosing(box.stream(_SHOW, job_id, log, timeout_s=_READ_TIMEOUT_S)) as stream:
            async for chunk in stream:
                sink(chunk)


def _from_files(owner: Owner, here: Installation, given: Given) -> Source:
    """Return this machine's copies, which are masked already."""
    from gpu_flows.remote.masking import Masker

    folder = _copies(owner, here)
    if folder is None:
        raise BadRequest(
            f"{shown(owner)} holds no boxes, and this machine has no log of it",
            hint="`gpu-flows ps` lists owners",
        )
    node, rank = given.get("node", 0), given.get("rank", 0)
    wanted = _wanted({"node": f"node-{node}.log", "rank": f"rank-{rank}.log"}, given)
    if not any((folder / name).exists() for name in wanted.values()):
        there = ", ".join(sorted(path.stem for path in folder.glob("*.log"))) or "none"
        job_id = folder.name.partition("@")[0]
        raise BadRequest(f"there is no such log of job {job_id}; there are: {there}")

    def read(sinks: Mapping[str, Sink]) -> None:
        for name, sink in sinks.items():
            if (folder / name).exists():
                with (folder / name).open("rb") as file:
                    while chunk := file.read(_CHUNK_BYTES):
                        sink(chunk)

    logs = {f"{what} {node if what == 'node' else rank}": name for what, name in wanted.items()}
    return Source(folder.name.partition("@")[0], logs, read, Masker({}))


def _wanted(names: Mapping[str, str], given: Given) -> Mapping[str, str]:
    """Return the one log that a flag names, or both."""
    return {what: name for what, name in names.items() if what in given} or names


def _copies(owner: Owner, here: Installation) -> Path | None:
    """Return the folder of this machine's copies of the logs of an owner's last job."""
    from gpu_flows.leases.lease import lease_id

    folder = here.settings.logs / lease_id(owner, here.namespace(())) / "logs"
    jobs = [path for path in folder.glob("*") if path.is_dir()]
    return max(jobs, key=lambda path: path.stat().st_mtime, default=None)


def _write_bytes(source: Source, output: Output) -> None:
    for log in source.logs.values():
        stream = source.masker.stream()
        source.read({log: lambda data, stream=stream: output.raw(stream.feed(data))})  # type: ignore[misc]
        output.raw(stream.finish())


def _write_lines(source: Source, output: Output) -> None:
    from gpu_flows.remote.lines import LineStream

    lines = {log: (label, LineStream(masker=source.masker)) for label, log in source.logs.items()}

    def sink(log: str) -> Sink:
        label, stream = lines[log]
        return lambda data: output.lines(label, stream.feed(data))

    source.read({log: sink(log) for log in lines})
    for label, stream in lines.values():
        output.lines(label, stream.close())


def _write_document(owner: Owner, source: Source, output: Output) -> None:
    texts = {}
    for label, log in source.logs.items():
        chunks: list[bytes] = []
        source.read({log: chunks.append})
        text = b"".join(chunks).decode(errors="replace")
        texts[label] = source.masker.mask(text)
    output.document({"owner": list(owner.parts), "job": source.job_id, "logs": texts})


COMMANDS = {"logs": logs}
