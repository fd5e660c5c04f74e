"""Hot Aisle connections."""

from __future__ import annotations

from typing import Any, ClassVar

from airflow_provider.hooks.base import CloudHook


class HotAisleHook(CloudHook):
    """A Hot Aisle team: its API key is the connection's password."""

    conn_type: ClassVar[str] = "hotaisle"
    default_conn_name: ClassVar[str] = "hotaisle_default"
    hook_name: ClassVar[str] = "Hot Aisle"
    cloud_name: ClassVar[str] = "hotaisle"
    fields: ClassVar[tuple[str, ...]] = ("base_url", "team")

    def get_conn(self) -> Any:
        """Return an ``httpx.Client`` for the API with the key set: the vendor has no client for Python."""
        import httpx

        from gpu_flows.clouds.hotaisle.cloud import API

        options = self.options()
        headers = {"Authorization": f"Token {options.get('api_key', '')}"}
        return httpx.Client(base_url=options.get("base_url") or API, headers=headers, timeout=30)
