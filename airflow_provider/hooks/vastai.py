"""Vast.ai connections."""

from __future__ import annotations

from typing import Any, ClassVar

from airflow_provider.hooks.base import CloudHook, missing


class VastaiHook(CloudHook):
    """A Vast.ai account: its API key is the connection's password."""

    conn_type: ClassVar[str] = "vastai"
    default_conn_name: ClassVar[str] = "vastai_default"
    hook_name: ClassVar[str] = "Vast.ai"
    cloud_name: ClassVar[str] = "vastai"
    fields: ClassVar[tuple[str, ...]] = ("base_url", "reliability", "verified", "bid_factor")

    def get_conn(self) -> Any:
        """Return the vendor's ``vastai.VastAI``."""
        try:
            from vastai import VastAI  # type: ignore[import-untyped,unused-ignore]
        except ImportError as error:
            raise missing("vastai", "vastai", error) from error
        options = self.options()
        url = {"server_url": options["base_url"]} if "base_url" in options else {}
        return VastAI(api_key=options.get("api_key"), **url)
