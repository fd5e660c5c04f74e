"""Two trainings on the same box, which is rented once and given back whatever happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow

from prefect_blocks import CLEANUP, gpu_box, launch_ddp

CODE = Path(__file__).parent / "code"


@flow(name="gpu-flows two jobs", **CLEANUP)
def two_jobs(gpus: str = "cpu", clouds: list[str] | None = None) -> list[Any]:
    """Train with two learning rates, one after the other."""
    with gpu_box("two-jobs", gpus=gpus, clouds=clouds, price_cap=40, max_duration="20m") as box:
        return [
            launch_ddp(box, "rates.sh", code=CODE, args=[rate], outputs=[f"rate-{rate}.txt"])
            for rate in ("0.1", "0.01")
        ]


if __name__ == "__main__":
    print([report["outputs"] for report in two_jobs()])
