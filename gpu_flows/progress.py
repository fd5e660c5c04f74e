"""What is going on, for whoever shows it: a terminal, a task log, an artifact."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Progress:
    """One thing that happened.

    Attributes:
        step: ``resolve``, ``provision``, ``upload``, ``launch``, ``outputs`` or ``teardown``.
        kind: What happened, machine-readable, such as ``box.rented``.
        message: The same as a sentence for people.
        data: Plain JSON values with the details; never a secret.
    """

    step: str
    kind: str
    message: str
    data: Mapping[str, Any] = field(default_factory=dict)


Listener = Callable[[Progress], None]


def ignore(_: Progress) -> None:
    """Listen to nothing."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: ``1 box``, ``2 boxes``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
