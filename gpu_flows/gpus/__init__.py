"""What is asked for: the catalog of GPUs and the grammar of requests.

Names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_flows.gpus.catalog import (
        Catalog,
        find,
        from_cloud_id,
        from_product_name,
        list_gpus,
        load_catalog,
        nominal_vram_gb,
        vram_for,
    )
    from gpu_flows.gpus.groups import GpuGroup, GpuType
    from gpu_flows.gpus.model import GpuModel, GpuVariant
    from gpu_flows.gpus.request import GpuAlternative, GpuRequest

_HOME = {
    "Catalog": "catalog",
    "find": "catalog",
    "from_cloud_id": "catalog",
    "from_product_name": "catalog",
    "list_gpus": "catalog",
    "load_catalog": "catalog",
    "nominal_vram_gb": "catalog",
    "vram_for": "catalog",
    "GpuGroup": "groups",
    "GpuType": "groups",
    "GpuModel": "model",
    "GpuVariant": "model",
    "GpuAlternative": "request",
    "GpuRequest": "request",
}

__all__ = [
    "Catalog",
    "GpuAlternative",
    "GpuGroup",
    "GpuModel",
    "GpuRequest",
    "GpuType",
    "GpuVariant",
    "find",
    "from_cloud_id",
    "from_product_name",
    "list_gpus",
    "load_catalog",
    "nominal_vram_gb",
    "vram_for",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value
