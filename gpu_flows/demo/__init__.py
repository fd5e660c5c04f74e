"""The demo: the whole way, from a request to a proof that nothing is left, on two boxes of this machine."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_flows.errors import GpuFlowsError, MissingExtra

if TYPE_CHECKING:
    from gpu_flows.leases.lease import Owner
    from gpu_flows.runs.installation import Installation
    from gpu_flows.runs.report import RunReport
    from gpu_flows.runs.run import Following
    from gpu_flows.settings import Settings

LEAST_ACCURACY = 0.95
"""On digits that the network was not trained with; chance is 0.1."""

SCRIPT = Path(__file__).with_name("train_digits.py")


class DemoFailed(GpuFlowsError):
    """The demo ran, and did not show what it promises."""

    code = "DEMO_FAILED"


@dataclass(frozen=True, slots=True)
class Shown:
    """What the demo showed.

    Attributes:
        report: The report of the run.
        metrics: What the training wrote into its ``metrics.json``.
        folder: Where the checkpoint and the metrics lie.
    """

    report: RunReport
    metrics: dict[str, Any]
    folder: Path


def check_installed() -> None:
    """Make sure that the demo's own dependencies are there.

    Raises:
        MissingExtra: Naming the one that is not.
    """
    for package, distribution in (("torch", "torch"), ("numpy", "numpy"), ("sklearn", "scikit-learn")):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(distribution, "demo")


def settings_for(user: Settings) -> Settings:
    """Return the settings for the demo: limits on what may be rented do not concern boxes that cost nothing."""
    return dataclasses.replace(user, enabled_clouds=(), max_gpus=None, max_usd_per_hour=None)


def run_demo(owner: Owner, *, installation: Installation, following: Following, folder: Path) -> Shown:
    """Train a small network with DDP on two boxes with two ranks each, and give them back.

    Args:
        owner: Who answers for the boxes.
        installation: With `settings_for` its settings.
        following: How it is followed.
        folder: Where the checkpoint and the metrics go.

    Returns:
        What was shown; a training that failed is shown by its report alone, without metrics.

    Raises:
        DemoFailed: When the accuracy is too low, or a box is left although the report says otherwise.
        MissingExtra: When torch or scikit-learn is not installed.
    """
    from gpu_flows.runs.run import run

    check_installed()
    report = run(
        SCRIPT.name,
        gpus=f"cpu:{min(2, os.cpu_count() or 1)}",
        clouds=["local"],
        code=SCRIPT,
        nodes=2,
        nproc_per_node=2,
        args=["--out", "."],
        outputs=["model.pt", "metrics.json"],
        outputs_to=folder,
        max_duration="30m",
        name=owner,
        installation=installation,
        following=following,
    )
    if not report.ok:
        return Shown(report, {}, folder)
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    if metrics["accuracy"] <= LEAST_ACCURACY:
        raise DemoFailed(f"the accuracy is {metrics['accuracy']:.4f}, not above {LEAST_ACCURACY}")
    left = installation.cloud("local").find(f"gf1-{report.namespace}-{report.lease}-")
    if left:
        raise DemoFailed(f"the report says that all boxes are gone, and {len(left)} are there")
    return Shown(report, metrics, folder)
