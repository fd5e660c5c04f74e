"""Where a box answers SSH: the one thing that clouds hand out and the remote room takes in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SshEndpoint:
    """An SSH address, with the host key that was pinned at the first contact.

    Attributes:
        host: Name or address.
        port: TCP port.
        username: Login name.
        host_key: The pinned key as ``"<algorithm> <base64>"``; None before the first contact.
        proxy: A jump host that must be passed first.
    """

    host: str
    port: int = 22
    username: str = "root"
    host_key: str | None = None
    proxy: SshEndpoint | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the endpoint as plain JSON values; it holds no secret."""
        return {
            "host": self.host,
            "port": self.port,
            "username": self.username,
            "host_key": self.host_key,
            "proxy": self.proxy.to_json() if self.proxy else None,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SshEndpoint:
        """Rebuild an endpoint from what `to_json` returned."""
        proxy = data.get("proxy")
        return cls(
            host=data["host"],
            port=data["port"],
            username=data["username"],
            host_key=data.get("host_key"),
            proxy=cls.from_json(proxy) if proxy else None,
        )
