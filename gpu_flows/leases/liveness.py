"""Does this owner still want its boxes? Asked before a create, after it, and at each heartbeat."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Protocol

from gpu_flows.leases.journal import Journal, process_start
from gpu_flows.leases.lease import Owner


class OwnerLiveness(Protocol):
    """Knows whether owners still want what they rented."""

    def wants(self, owner: Owner | None, namespace: str, lease: str) -> bool | None:
        """Tell whether the owner of a lease still wants its boxes.

        Args:
            owner: The owner, where it is known.
            namespace: The installation.
            lease: The lease id.

        Returns:
            True or False where that is known; None for an owner that nobody here knows, which is never
            taken for ended.
        """
        ...


class JournalLiveness:
    """Asks this machine's journals: a scope whose process has died wants nothing any more.

    Args:
        folder: Folder of the installation's journals.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def wants(self, owner: Owner | None, namespace: str, lease: str) -> bool | None:
        """Tell whether the process that holds the lease runs; None for another machine's or a detached one."""
        holder = Journal(self.folder, namespace, lease).holder()
        if holder is None or holder["detached"] or holder["host"] != socket.gethostname():
            return None
        return bool(process_start(holder["pid"]) == holder["started"])
