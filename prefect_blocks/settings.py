"""What holds for the installation, as Prefect's settings say it."""

from __future__ import annotations

from typing import Any

from prefect.settings.base import PrefectBaseSettings, build_settings_config
from pydantic import Field

from gpu_flows.settings import Settings, load_settings


class GpuFlowsSettings(PrefectBaseSettings):
    """Settings of gpu-flows within Prefect: ``PREFECT_INTEGRATIONS_GPU_FLOWS_*``, or a table of ``prefect.toml``.

    What is not set here comes from gpu-flows' own file and environment.
    """

    model_config = build_settings_config(("integrations", "gpu_flows"))

    namespace: str | None = Field(
        default=None, description="Tells this installation's boxes from those of every other one."
    )
    clouds: str | None = Field(default=None, description="Default list of clouds, with commas.")
    enabled_clouds: str | None = Field(
        default=None, description="The only clouds that may be rented from, with commas."
    )
    max_gpus: int | None = Field(default=None, description="Most GPUs that one lease may hold.")
    max_usd_per_hour: float | None = Field(
        default=None, description="Most dollars per hour that one lease may cost."
    )


def current_settings() -> Settings:
    """Return the settings of the installation.

    Raises:
        SettingsError: When one of them cannot be understood.
    """
    told: dict[str, Any] = GpuFlowsSettings().model_dump()
    for name in ("clouds", "enabled_clouds"):
        if told[name] is not None:
            told[name] = tuple(part.strip() for part in told[name].split(",") if part.strip())
    return load_settings(**told)
