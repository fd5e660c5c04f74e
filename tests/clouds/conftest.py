from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# The suite that every cloud runs through lies in a module of its own: its assertions explain themselves too.
pytest.register_assert_rewrite("tests.clouds.contract")


def marked_processes(marker: str = "GPU_FLOWS_BOX_ID=") -> dict[int, str]:
    """Return every living process that carries a box's marker, found without the code under test."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if any(variable.startswith(marker.encode()) for variable in environment):
                found[int(entry.name)] = command
    return found


@pytest.fixture(scope="session", autouse=True)
def no_process_outlives_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail when a process of a box of these tests is left; boxes of other users of the machine are theirs."""
    yield
    mine = str(tmp_path_factory.getbasetemp())
    left = {
        pid: command for pid, command in marked_processes().items() if mine in command or mine in _home(pid)
    }
    assert not left


def _home(pid: int) -> str:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((os.fsdecode(value) for value in environment if value.startswith(b"HOME=")), "")
