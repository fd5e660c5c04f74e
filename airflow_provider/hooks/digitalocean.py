"""DigitalOcean connections."""

from __future__ import annotations

from typing import Any, ClassVar

from airflow_provider.hooks.base import CloudHook, missing


class DigitalOceanHook(CloudHook):
    """A DigitalOcean account: its token is the connection's password."""

    conn_type: ClassVar[str] = "digitalocean"
    default_conn_name: ClassVar[str] = "digitalocean_default"
    hook_name: ClassVar[str] = "DigitalOcean"
    cloud_name: ClassVar[str] = "digitalocean"
    fields: ClassVar[tuple[str, ...]] = ("base_url", "token_on_box")
    secret_fields: ClassVar[tuple[str, ...]] = ("token_on_box",)
    password_option: ClassVar[str] = "token"  # noqa: S105 - the name of an argument

    def get_conn(self) -> Any:
        """Return the vendor's ``pydo.Client``."""
        try:
            from pydo import Client
        except ImportError as error:
            raise missing("pydo", "digitalocean", error) from error
        options = self.options()
        url = {"endpoint": options["base_url"]} if "base_url" in options else {}
        return Client(token=options.get("token"), **url)
