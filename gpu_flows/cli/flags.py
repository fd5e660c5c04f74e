"""The flags of all verbs: each parameter has here the name that it has in Python, in a DAG and in a flow."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_flows.cli.verbs import Flag

_RENT, _RUN, _FOLLOW, _WHO = "What to rent", "What to run", "How it is followed", "Whose boxes"


def _clouds() -> Sequence[str]:
    from gpu_flows.clouds import CLOUDS

    return list(CLOUDS)


def _requests() -> Sequence[str]:
    from gpu_flows.gpus.catalog import list_gpus

    return [*(model.name for model in list_gpus()), "cpu"]


def _owners() -> Sequence[str]:
    """Return the owners of the command line that this machine knows of and whose boxes may live."""
    from gpu_flows.leases.journal import journals
    from gpu_flows.settings import ensure_namespace, load_settings

    known = journals(load_settings().journals, ensure_namespace())
    owners = [owner for journal in known if journal.live_boxes() and (owner := journal.owner())]
    return [owner[1] for owner in owners if owner[0] == "cli" and len(owner) == 2]


GPUS = Flag(
    "gpus",
    list[str],
    "What is asked for: H100:8, A100-80GB, RTX4090, cpu:2. Given again, the next best.",
    _RENT,
    metavar="REQUEST",
    words=_requests,
)
WHERE = (
    Flag(
        "clouds",
        list[str],
        "Where to ask, in order: runpod,aws or runpod@account.",
        _RENT,
        metavar="CLOUD,...",
        words=_clouds,
    ),
    Flag("provider", str, "Another way to name one cloud.", _RENT, metavar="CLOUD", words=_clouds),
)
CONDITIONS = (
    Flag("regions", list[str], "Regions to keep, as the clouds call them.", _RENT, metavar="REGION,..."),
    Flag("min_vram_gb", float, "Least nominal memory per GPU.", _RENT, metavar="GB"),
    Flag("disk_gb", int, "Disk of each box.", _RENT, metavar="GB"),
    Flag("nodes", int, "Number of boxes.", _RENT, metavar="N"),
    Flag(
        "spot",
        str,
        "Interruptible boxes: never (default), prefer, only.",
        _RENT,
        metavar="WHETHER",
        words=("never", "prefer", "only"),
    ),
    Flag("price_cap", float, "Dollars per hour for one whole box.", _RENT, metavar="USD"),
    Flag(
        "strategy",
        str,
        "ordered (default): by the order of the requests; cheapest: by price.",
        _RENT,
        metavar="HOW",
        words=("ordered", "cheapest"),
    ),
    Flag("max_duration", str, "Longest time of the job: 90m, 6h, 1d12h. Default 24h.", _RENT, metavar="TIME"),
    Flag("ready_timeout_s", float, "Longest wait for a box to be ready.", _RENT, metavar="SECONDS"),
)
RENTING = (
    GPUS,
    *WHERE,
    *CONDITIONS,
    Flag("image", list[str], "Image of the box: one, or CLOUD=IMAGE, given again.", _RENT, metavar="IMAGE"),
    Flag("wait_for_capacity", str, "How long to go on asking. Default 0.", _RENT, metavar="TIME"),
    Flag(
        "allow_unreaped",
        bool,
        "Rent also where a box cannot end its own billing: run `reap` on a schedule.",
        _RENT,
    ),
)
MAX_COST = Flag(
    "max_cost", float, "Dollars for the whole run; it is stopped when they are spent.", _RENT, metavar="USD"
)
CONFIG = Flag(
    "config", str, "TOML file with tables [training] and [rental]; flags win.", _RUN, metavar="FILE"
)
ENTRYPOINT = Flag(
    "entrypoint",
    str,
    "What to run: train.py, train.sh, or with --launcher command a line for bash.",
    metavar="ENTRYPOINT",
    positional=True,
)
TRAINING = (
    ENTRYPOINT,
    Flag("module", str, "Run a module instead of a file.", _RUN, ("--module", "-m"), metavar="NAME"),
    Flag(
        "code", str, "Folder or file to upload. Default: the folder of the entrypoint.", _RUN, metavar="PATH"
    ),
    Flag("include", list[str], "Files to upload although git ignores them.", _RUN, metavar="GLOB"),
    Flag(
        "setup",
        list[str],
        "Command for bash before the start; given again, the next one.",
        _RUN,
        metavar="COMMAND",
    ),
    Flag(
        "env",
        list[str],
        "Environment variable of the job, or the name of one to pass on.",
        _RUN,
        metavar="NAME=VALUE",
    ),
    Flag(
        "secrets",
        list[str],
        "Secret that the job gets, read from the variable NAME here, or from SOURCE.",
        _RUN,
        ("--secret",),
        metavar="NAME[=SOURCE]",
    ),
    Flag("outputs", list[str], "Files to fetch when the job has ended.", _RUN, ("--output",), metavar="GLOB"),
    Flag("outputs_to", str, "Folder for them. Default: the folder of the run.", _RUN, metavar="FOLDER"),
    Flag(
        "launcher",
        str,
        "torchrun (default), python, or command.",
        _RUN,
        metavar="LAUNCHER",
        words=("torchrun", "python", "command"),
    ),
    Flag("nproc_per_node", int, "Processes on each box. Default: one per GPU.", _RUN, metavar="N"),
    CONFIG,
)
FOLLOWING = (
    Flag(
        "heartbeat_timeout_s",
        float,
        "Boxes end themselves when nobody follows for so long. Default 1800; 0 for never.",
        _FOLLOW,
        metavar="SECONDS",
    ),
    Flag("detach", bool, "Return as soon as the job runs; the boxes end at their deadline.", _FOLLOW),
)
MAX_PREEMPTIONS = Flag(
    "max_preemptions",
    int,
    "How often the run goes on elsewhere after a box was taken away. Default 3.",
    _FOLLOW,
    metavar="N",
)
OWNER = Flag(
    "owner",
    str,
    'Name of the owner, or its JSON list: ["airflow", ...].',
    _WHO,
    ("--owner", "--name"),
    metavar="NAME",
    words=_owners,
)
