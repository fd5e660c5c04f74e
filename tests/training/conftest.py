from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.training.nodes import Node


@pytest.fixture
def new_node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Make nodes, and end all that runs on them."""
    nodes: list[Node] = []
    numbers = itertools.count()

    def make(**options: object) -> Node:
        home = tmp_path / f"home {next(numbers)}"
        home.mkdir()
        nodes.append(Node(home, **options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


@pytest.fixture
def node(new_node: Callable[..., Node]) -> Node:
    return new_node()


@pytest.fixture
def until() -> Callable[..., None]:
    """Wait for something to become true."""

    def wait(condition: Callable[[], object], timeout_s: float = 60) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, "it never came true"
            time.sleep(0.02)

    return wait
