from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.conftest import machine

__all__ = ["machine"]


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run one Prefect server for every test of the room."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=180):
        yield tmp_path_factory.mktemp("prefect")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = os.fspath(Path(__file__).parent)
    for item in items:
        # One worker takes them all, so that one server serves them.
        if os.fspath(item.path).startswith(here):
            item.add_marker(pytest.mark.xdist_group("prefect"))
