"""The files of this package that run on a box."""

from __future__ import annotations

from functools import cache
from importlib import resources


@cache
def shipped(name: str) -> str:
    """Return the text of a file that is sent to boxes.

    Args:
        name: ``distributed.py``, or a file of ``scripts/``.
    """
    folder = resources.files("gpu_flows.training")
    return (folder / name if name == "distributed.py" else folder / "scripts" / name).read_text(
        encoding="utf-8"
    )
