"""Connections: one hook for each cloud, and which hook opens which cloud."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow_provider.hooks.base import CloudHook
    from gpu_flows.clouds import CloudRef

HOOKS: dict[str, str] = {
    "aws": "airflow_provider.hooks.aws:AwsHook",
    "digitalocean": "airflow_provider.hooks.digitalocean:DigitalOceanHook",
    "hotaisle": "airflow_provider.hooks.hotaisle:HotAisleHook",
    "runpod": "airflow_provider.hooks.runpod:RunpodHook",
    "vastai": "airflow_provider.hooks.vastai:VastaiHook",
}
"""The hook of each cloud that needs credentials; it is imported when it is first used."""


def hook_for(ref: CloudRef) -> CloudHook | None:
    """Return the hook that opens an account of a cloud; None for a cloud without credentials (`local`).

    Args:
        ref: ``runpod`` stands for the connection ``runpod_default``, ``runpod@team_a`` for ``team_a``.
    """
    if ref.cloud not in HOOKS:
        return None
    module, _, name = HOOKS[ref.cloud].partition(":")
    kind: type[CloudHook] = getattr(importlib.import_module(module), name)
    return kind(kind.default_conn_name if ref.account == "default" else ref.account)
