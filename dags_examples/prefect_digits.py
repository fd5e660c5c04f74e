"""One training in one flow, on two boxes of this machine: the shortest flow that trains and gives back."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prefect import flow

from prefect_blocks import CLEANUP, run


@flow(name="gpu-flows digits", retries=1, **CLEANUP)
def digits(gpus: str = "cpu", nodes: int = 2) -> dict[str, Any]:
    """Train a small network on handwritten digits."""
    demo = find_spec("gpu_flows.demo")
    assert demo is not None
    assert demo.origin is not None
    return run(
        "train_digits.py",
        code=Path(demo.origin).parent,
        gpus=gpus,
        nodes=nodes,
        outputs=["metrics.json", "outputs/*"],
        max_duration="20m",
    )


if __name__ == "__main__":
    print(digits()["cost"])
