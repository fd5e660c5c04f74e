"""The parameters of the flows, as forms for the UI and for ``prefect deployment run``."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Preset = StrEnum(  # type: ignore[misc]  # the members are the catalog's business
    "Preset",
    {
        "CPU": "cpu",
        **{
            f"{name.replace('-', '_')}_{count}": f"{name}:{count}"
            for name in ("H200", "H100", "A100-80GB", "L40S", "RTX4090", "MI300X")
            for count in (1, 2, 4, 8)
        },
    },
)
"""Common requests, to be picked from a list."""


class Renting(BaseModel):
    """What to rent, and under which conditions."""

    model_config = ConfigDict(extra="forbid")

    gpus: Preset = Field(default=Preset("cpu"), title="GPUs", description="A common request.")
    or_gpus: list[str] = Field(
        default=[],
        title="Other requests",
        description="Requests in order of preference, such as A100-80GB:4; instead of the one above.",
    )
    clouds: list[str] = Field(
        default=[],
        description="Where to rent, in order: runpod, or runpod@prod for its block; the configured if empty.",
    )
    regions: list[str] = Field(default=[], description="Regions to keep; all if empty.")
    nodes: int = Field(default=1, ge=1, le=99, description="Number of boxes.")
    price_cap: float | None = Field(default=None, ge=0, description="Dollars per hour for one whole box.")
    max_cost: float | None = Field(default=None, ge=0, description="Dollars for the whole run.")
    max_duration: str = Field(default="24h", description="Longest time of the job, such as 6h or 1d12h.")
    spot: Literal["never", "prefer", "only"] = Field(
        default="never", description="Whether boxes that may be interrupted are wanted."
    )
    strategy: Literal["ordered", "cheapest"] = Field(
        default="ordered", description="Whether the order of the requests or the price comes first."
    )
    disk_gb: int | None = Field(default=None, ge=1, title="Disk (GB)", description="Disk of each box.")
    wait_for_capacity: str = Field(default="0", description="How long to go on asking, such as 2h.")
    allow_unreaped: bool = Field(
        default=False, description="Rent also where a box cannot end its own billing."
    )
    limit: str | None = Field(
        default=None,
        title="Concurrency limit",
        description="A global concurrency limit that bounds the boxes.",
    )

    def asked(self) -> dict[str, Any]:
        """Return it as the parameters of `prefect_blocks.gpu_box`."""
        fields = self.model_dump(exclude={"gpus", "or_gpus"})
        return {**fields, "gpus": self.or_gpus or str(self.gpus), "clouds": self.clouds or None}


class Training(BaseModel):
    """What to run on the boxes."""

    model_config = ConfigDict(extra="forbid")

    entrypoint: str = Field(description="A Python file, a shell file, or -m and a module.")
    code: str | None = Field(default=None, description="Folder to upload; that of the entrypoint if empty.")
    args: list[str] = Field(default=[], description="Arguments of the script.")
    env: dict[str, str] = Field(default={}, description="Environment variables; not the place for secrets.")
    secrets: list[str] = Field(
        default=[], description="Names of variables or Secret blocks whose values the job gets."
    )
    setup: list[str] = Field(default=[], description="Commands before the start.")
    outputs: list[str] = Field(default=[], description="Globs of files to fetch.")
    outputs_to: str | None = Field(default=None, description="Folder for them; that of the run if empty.")

    def fields(self) -> dict[str, Any]:
        """Return what is set, as fields of `gpu_flows.TrainingSpec`."""
        return self.model_dump(exclude_defaults=True)


class Cell(BaseModel):
    """One training of a sweep: what it has beyond the others."""

    model_config = ConfigDict(extra="forbid")

    args: list[str] = Field(default=[], description="Arguments after the common ones.")
    env: dict[str, str] = Field(default={}, description="Environment variables beyond the common ones.")
    key: str | None = Field(default=None, description="Its name; computed from its parameters if empty.")


__all__ = ("Cell", "Preset", "Renting", "Training")
