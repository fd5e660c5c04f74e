"""The section ``[gpu_flows]`` of Airflow's configuration."""

from __future__ import annotations

import os
from dataclasses import fields

from airflow_provider._compat import configuration
from gpu_flows.settings import Settings, load_settings

SECTION = "gpu_flows"
OPTIONS = tuple(field.name for field in fields(Settings) if field.name not in ("accounts", "state"))
"""Accounts are connections here."""


def airflow_settings() -> Settings:
    """Return the installation's settings; what Airflow's configuration says wins.

    Raises:
        SettingsError: When one cannot be understood.
    """
    conf = configuration()
    told = {name: conf.get(SECTION, name, fallback=None) for name in OPTIONS}
    # The engine reads and checks texts of the environment: ours are put in their place.
    texts = {f"GPU_FLOWS_{name.upper()}": str(value) for name, value in told.items() if value}
    return load_settings({**os.environ, **texts})


def default_deferrable() -> bool:
    """Return whether operators free their worker slot while they wait, unless a task says otherwise."""
    return bool(configuration().getboolean("operators", "default_deferrable", fallback=False))
