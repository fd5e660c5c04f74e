"""What importing the collection costs."""

from __future__ import annotations

from tests.test_imports import HEAVY, loaded_by

# Prefect itself brings pydantic and rich.
ALLOWED = {"prefect", "pydantic", "rich"}


def test_importing_the_collection_loads_no_cloud_sdk() -> None:
    modules = set(loaded_by("import prefect_blocks"))
    assert modules & (set(HEAVY) - ALLOWED) == set()
    assert not {m for m in modules if m.startswith("gpu_flows.clouds.")} - {
        "gpu_flows.clouds.base",
        "gpu_flows.clouds.errors",
    }
