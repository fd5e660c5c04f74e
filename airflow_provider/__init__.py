"""gpu-flows for Airflow: a thin package over the engine in `gpu_flows`.

Public names are loaded when they are first used: importing the package costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow_provider.operators.launch import LaunchDDPOperator
    from airflow_provider.operators.provision import ProvisionBoxOperator, ReserveBoxOperator
    from airflow_provider.operators.reap import ReapOperator
    from airflow_provider.operators.resolve import ResolveGpuOperator
    from airflow_provider.operators.teardown import TeardownOperator
    from airflow_provider.operators.train import GpuTrainOperator
    from airflow_provider.scope import gpu_box
    from airflow_provider.sensors.available import GpuAvailableSensor

_HOMES = {
    "GpuAvailableSensor": "sensors.available",
    "GpuTrainOperator": "operators.train",
    "LaunchDDPOperator": "operators.launch",
    "ProvisionBoxOperator": "operators.provision",
    "ReapOperator": "operators.reap",
    "ReserveBoxOperator": "operators.provision",
    "ResolveGpuOperator": "operators.resolve",
    "TeardownOperator": "operators.teardown",
    "gpu_box": "scope",
}

__all__ = [
    "GpuAvailableSensor",
    "GpuTrainOperator",
    "LaunchDDPOperator",
    "ProvisionBoxOperator",
    "ReapOperator",
    "ReserveBoxOperator",
    "ResolveGpuOperator",
    "TeardownOperator",
    "gpu_box",
]


def __getattr__(name: str) -> Any:
    if (module := _HOMES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
