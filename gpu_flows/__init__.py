"""Rent GPU boxes, train on them over SSH with PyTorch DDP, and give them back, whatever happens.

Public names are loaded when they are first used: importing the package costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_flows import distributed
    from gpu_flows.errors import BadRequest, GpuFlowsError, MissingExtra, SettingsError
    from gpu_flows.gpus import (
        GpuGroup,
        GpuModel,
        GpuRequest,
        GpuType,
        find,
        list_gpus,
        vram_for,
    )
    from gpu_flows.leases.lease import Lease, Owner
    from gpu_flows.leases.provision import ProvisionError
    from gpu_flows.leases.teardown import TeardownFailed, TeardownReport
    from gpu_flows.offers import Offer, Spot, Strategy
    from gpu_flows.runs.installation import Installation
    from gpu_flows.runs.report import RunReport
    from gpu_flows.runs.run import Following, dry_run, run
    from gpu_flows.runs.steps import (
        gpu_box,
        launch_ddp,
        provision_box,
        reserve,
        resolve_gpu,
        teardown_box,
    )
    from gpu_flows.training.spec import TrainingSpec

_HOMES = {
    "gpu_flows.errors": ("BadRequest", "GpuFlowsError", "MissingExtra", "SettingsError"),
    "gpu_flows.gpus": ("GpuGroup", "GpuModel", "GpuRequest", "GpuType", "find", "list_gpus", "vram_for"),
    "gpu_flows.leases.lease": ("Lease", "Owner"),
    "gpu_flows.leases.provision": ("ProvisionError",),
    "gpu_flows.leases.teardown": ("TeardownFailed", "TeardownReport"),
    "gpu_flows.offers": ("Offer", "Spot", "Strategy"),
    "gpu_flows.runs.installation": ("Installation",),
    "gpu_flows.runs.report": ("RunReport",),
    "gpu_flows.runs.run": ("Following", "dry_run", "run"),
    "gpu_flows.runs.steps": (
        "gpu_box",
        "launch_ddp",
        "provision_box",
        "reserve",
        "resolve_gpu",
        "teardown_box",
    ),
    "gpu_flows.training.spec": ("TrainingSpec",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "BadRequest",
    "Following",
    "GpuFlowsError",
    "GpuGroup",
    "GpuModel",
    "GpuRequest",
    "GpuType",
    "Installation",
    "Lease",
    "MissingExtra",
    "Offer",
    "Owner",
    "ProvisionError",
    "RunReport",
    "SettingsError",
    "Spot",
    "Strategy",
    "TeardownFailed",
    "TeardownReport",
    "TrainingSpec",
    "distributed",
    "dry_run",
    "find",
    "gpu_box",
    "launch_ddp",
    "list_gpus",
    "provision_box",
    "reserve",
    "resolve_gpu",
    "run",
    "teardown_box",
    "vram_for",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name == "distributed":
        return importlib.import_module("gpu_flows.distributed")
    if (module := _HOME_OF.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
