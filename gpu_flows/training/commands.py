"""The launch on one node, as text: what the box will run is decided here and can be shown before it is rented.

Pure. The scripts in ``scripts/`` say how a node is launched; this module writes the lines above them that say
what. Everything that the user wrote travels in files of the job, quoted once for a POSIX shell, and passes no
second parser: torchrun never sees the script's arguments.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpu_flows.training.shipped import shipped
from gpu_flows.training.spec import Kind, Launcher, TrainingSpec

RANK_LOGS = "ranks"
"""Folder within the job's folder: ``<rank>.log`` and ``<rank>.exit`` of every rank of the node."""
SETUP_EXIT = "setup.exit"
"""File within the job's folder that says how the setup ended."""

# A box may come with these for ranks that are not ours (RunPod's clusters preset WORLD_SIZE and NODE_RANK).
_FOREIGN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
)

_BASH = '"$(command -v bash || command -v sh)"'


@dataclass(frozen=True, slots=True)
class NodeCommand:
    """What starts a node's part of a job.

    Attributes:
        command: POSIX sh text; runs in the login's home and finds ``GPU_FLOWS_JOB_DIR`` set.
        env: Environment of the job: the user's ``env``. Secrets are not in it.
        files: What the command needs in the job's folder, by relative path.
        summary: The command in one readable line.
    """

    command: str
    env: Mapping[str, str]
    files: Mapping[str, bytes] = field(repr=False)
    summary: str


def node_command(
    spec: TrainingSpec,
    *,
    node: int,
    nodes: int,
    nproc: int,
    master_addr: str | None = None,
    master_port: int | None = None,
    interface: str | None = None,
    code_dir: str,
    rendezvous_timeout_s: int = 1800,
) -> NodeCommand:
    """Write the launch of one node.

    Args:
        spec: What to run.
        node: Index of the node, from 0; node 0 hosts the store of the rendezvous.
        nodes: Number of nodes.
        nproc: Processes on this node, the same on every node.
        master_addr: Address of node 0 as the others reach it; only for several nodes.
        master_port: Free port on node 0; only for several nodes.
        interface: Network interface between the nodes; None lets the box find the one that leads to node 0.
        code_dir: Where the code was uploaded to, absolute or relative to the login's home. It becomes the
            working directory.
        rendezvous_timeout_s: How long a node waits for the others; their setups may take unequally long.

    Raises:
        ValueError: When several nodes are asked for without an address and a port.
    """
    if nodes > 1 and (master_addr is None or master_port is None):
        raise ValueError(f"{nodes} nodes need the address and a port of node 0")
    options = [f"--nproc-per-node={nproc}"]
    if nodes == 1:
        options.append("--standalone")
    else:
        options += [f"--nnodes={nodes}", f"--node-rank={node}"]
        options += [f"--master-addr={master_addr}", f"--master-port={master_port}"]
    summary = _summary(spec, options)
    # The job starts in the login's home, but the setup may have gone elsewhere.
    root = shlex.quote(code_dir) if code_dir.startswith("/") else f'"$HOME"/{shlex.quote(code_dir)}'
    values = {
        "launcher": spec.launcher.value,
        "summary": summary,
        "nodes": nodes,
        "node": node,
        "nproc": nproc,
        "master_addr": master_addr or "",
        "master_port": master_port or "",
        "interface": interface or "",
        "rendezvous_timeout_s": rendezvous_timeout_s,
        "foreign": " ".join(name for name in _FOREIGN if name not in spec.env),
    }
    assignments = [f"root={root}", *(f"{name}={shlex.quote(str(value))}" for name, value in values.items())]
    files = {
        "launch.sh": "\n".join([*assignments, shipped("launch.sh")]),
        "rank.sh": f"set -- {_program(spec)}\n{shipped('rank.sh')}",
        "interpreter.sh": shipped("interpreter.sh"),
        "network.py": shipped("network.py"),
        "python/gpu_flows/__init__.py": "",
        "python/gpu_flows/distributed.py": shipped("distributed.py"),
    }
    command = 'exec sh "$GPU_FLOWS_JOB_DIR/launch.sh"'
    if spec.setup:
        files["setup.sh"] = _setup(spec.setup, root)
        command = f'exec {_BASH} "$GPU_FLOWS_JOB_DIR/setup.sh"'
    return NodeCommand(
        command=f"# {' '.join(summary.split())}\n{command}\n",
        env=dict(spec.env),
        files={name: text.encode() for name, text in files.items()},
        summary=summary,
    )


def _program(spec: TrainingSpec) -> str:
    """Return the words of one rank's program, quoted for a shell; which Python and which bash the box knows."""
    # A script's name must not be taken for an option of what runs it.
    path = shlex.quote(f"./{spec.target}" if spec.target.startswith("-") else spec.target)
    start = {
        Kind.FILE: f'"$GPU_FLOWS_PYTHON" {path}',
        Kind.MODULE: f'"$GPU_FLOWS_PYTHON" -m {shlex.quote(spec.target)}',
        Kind.SHELL_FILE: f"{_BASH} {path}",
        Kind.SHELL_LINE: f"{_BASH} -c {shlex.quote(spec.target)} gpu-flows",
    }
    return " ".join([start[spec.kind], *map(shlex.quote, spec.args)])


def _summary(spec: TrainingSpec, launcher_options: Sequence[str]) -> str:
    """Return the launch as a person would type it."""
    if spec.kind is Kind.SHELL_LINE:
        return " ".join([spec.target, *map(shlex.quote, spec.args)])
    ranks = spec.launcher is Launcher.TORCHRUN
    start = {
        Kind.FILE: [] if ranks else ["python"],
        Kind.MODULE: ["-m"] if ranks else ["python", "-m"],
        Kind.SHELL_FILE: ["--no-python", "bash"] if ranks else ["bash"],
    }
    words = ["torchrun", *launcher_options] if ranks else []
    return shlex.join([*words, *start[spec.kind], spec.target, *spec.args])


def _setup(commands: Sequence[str], root: str) -> str:
    """Return the setup as a script: every command in the same shell, so that an activated venv stays so."""
    # The line ends of a TOML file written on Windows are not meant for bash.
    lines = [command.replace("\r\n", "\n") for command in commands]
    return "\n".join(
        [
            f"gf_root={root}",
            f"gf_total={len(lines)}",
            shipped("setup.sh"),
            *(f"gf_run {number} {shlex.quote(line)}" for number, line in enumerate(lines, 1)),
            "gf_record 0 0",
            "trap - EXIT",
            'exec sh "$GPU_FLOWS_JOB_DIR/launch.sh"',
            "",
        ]
    )
