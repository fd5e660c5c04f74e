"""What happens, told to Prefect: gathered, levelled, and never in the way of the work."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest

from gpu_flows.progress import Progress
from prefect_blocks import telling
from prefect_blocks.telling import Courier, artifact_key


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Take events instead of a server."""
    found: list[tuple[str, str]] = []
    monkeypatch.setattr(
        "prefect.events.emit_event",
        lambda event, resource, payload: found.append((event, resource["prefect.resource.id"])),
    )
    return found


class Records:
    """Takes records as a run logger does."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, str]] = []
        self.came = threading.Event()

    def log(self, level: int, message: str, *args: Any) -> None:
        self.taken.append((level, message % args if args else message))
        self.came.set()

    def warning(self, message: str, *args: Any) -> None:
        self.log(logging.WARNING, message, *args)


def test_lines_are_gathered_into_few_records_and_none_is_lost() -> None:
    records = Records()
    lines = [f"step {number} loss {1 / (number + 1):.4f}" for number in range(100_000)]
    began = time.monotonic()
    with Courier(records) as courier:
        for line in lines:
            courier.show("rank 0", line)
        handed_over_s = time.monotonic() - began
    assert "\n".join(text for _, text in records.taken).split("\n") == lines
    assert max(len(text) for _, text in records.taken) <= telling.RECORD_BYTES
    size = sum(map(len, lines)) + len(lines)
    assert len(records.taken) <= size / telling.RECORD_BYTES * 1.2 + 20
    assert handed_over_s < 5


def test_a_single_line_does_not_wait_for_others_for_ever() -> None:
    records = Records()
    with Courier(records) as courier:
        courier.show("rank 0", "loading the data")
        assert records.came.wait(10)
        assert records.taken == [(logging.INFO, "loading the data")]


def test_rank_0_is_for_people_and_other_nodes_for_those_who_look_closer(emitted: Any) -> None:
    records = Records()
    with Courier(records) as courier:
        for label in ("rank 0", "node 0", "node 1"):
            courier.show(label, f"from {label}")
        courier.listen(Progress("provision", "box.rented", "rented a box"))
        courier.listen(Progress("launch", "heartbeat.failed", "a heartbeat failed"))
    assert records.taken == [
        (logging.INFO, "from rank 0"),
        (logging.INFO, "from node 0"),
        (logging.DEBUG, "[node 1] from node 1"),
        (logging.INFO, "rented a box"),
        (logging.WARNING, "a heartbeat failed"),
    ]


def test_each_event_names_its_box(emitted: list[tuple[str, str]]) -> None:
    with Courier(Records()) as courier:
        courier.listen(Progress("provision", "box.rented", "", {"id": "7", "cloud": "runpod@prod"}))
        courier.listen(Progress("provision", "box.ready", "", {"id": "7"}))
        courier.listen(Progress("teardown", "box.gone", "", {"id": "7", "cloud": "runpod@prod"}))
        courier.listen(Progress("teardown", "teardown.failed", "", {"cloud": "runpod@prod"}))
    assert emitted == [
        ("gpu-flows.box.rented", "gpu-flows.box.runpod@prod.7"),
        ("gpu-flows.box.ready", "gpu-flows.box.runpod@prod.7"),
        ("gpu-flows.box.destroyed", "gpu-flows.box.runpod@prod.7"),
        ("gpu-flows.box.leaked", "gpu-flows.box.runpod@prod.unknown"),
    ]


def test_what_cannot_be_shown_is_said_and_ends_nothing() -> None:
    def broken() -> None:
        raise ConnectionError("the server is away")

    records = Records()
    with Courier(records) as courier:
        courier.do("the report", broken)
        courier.show("rank 0", "training goes on")
    assert records.taken == [
        (logging.WARNING, "the report could not be shown: the server is away"),
        (logging.INFO, "training goes on"),
    ]


def test_a_server_that_hangs_is_not_waited_for() -> None:
    hangs = threading.Event()
    courier = Courier(Records())
    courier.__enter__()
    courier.do("an artifact", hangs.wait)
    began = time.monotonic()
    courier.close(timeout_s=0.2)
    assert time.monotonic() - began < 5
    hangs.set()


def test_keys_are_as_prefect_wants_them() -> None:
    assert artifact_key("Train_1", "0", "report") == "gpu-flows-train-1-report"
    assert artifact_key("train", "lr=0.1") == "gpu-flows-train-lr-0-1"
