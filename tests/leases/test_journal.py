from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu_flows.leases.journal import Journal, JournalUnwritable, journals, process_start


def test_entries_come_back_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "a", "lease")
    assert journal.entries() == []
    journal.record("intent", cloud="aws", name="n1")
    journal.record("failed", cloud="aws", name="n1")
    assert [entry["event"] for entry in journal.entries()] == ["intent", "failed"]
    assert [j.path for j in journals(tmp_path, "a")] == [journal.path]


def test_a_half_written_line_costs_only_itself(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "a", "lease")
    journal.record("intent", cloud="aws", name="n1")
    with journal.path.open("ab") as file:
        file.write(b'{"event": "crea')
    journal.record("intent", cloud="aws", name="n2")
    assert [entry["name"] for entry in journal.unsettled()] == ["n1", "n2"]


def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "a", "lease")
    journal.record("intent", cloud="aws", name="n1")
    assert journal.path.stat().st_mode & 0o777 == 0o600


def test_a_disk_that_is_full_is_said(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "a", "lease")
    journal.path.parent.mkdir()
    journal.path.symlink_to("/dev/full")
    with pytest.raises(JournalUnwritable, match="No space left"):
        journal.record("intent", cloud="aws", name="n1")


def test_a_process_is_told_from_another_one_with_its_pid() -> None:
    assert process_start(os.getpid()) == process_start(os.getpid()) is not None
    child = os.fork()
    if child == 0:
        os._exit(0)
    while process_start(child) is not None:
        os.sched_yield()
    assert process_start(child) is None, "a zombie does not run"
    os.waitpid(child, 0)
