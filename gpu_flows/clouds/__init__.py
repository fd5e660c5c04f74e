"""The clouds: who rents, one adapter each, behind one protocol.

A new cloud is one file (or one small package) here and one line in `CLOUDS`; see ``docs/adding-a-cloud.md``.
"""

from __future__ import annotations

import difflib
import importlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpu_flows.errors import BadRequest
from gpu_flows.offers import account_ref

if TYPE_CHECKING:
    from gpu_flows.clouds.base import Cloud

CLOUDS: dict[str, str] = {
    "local": "gpu_flows.clouds.local:LocalCloud",
    "digitalocean": "gpu_flows.clouds.digitalocean:DigitalOceanCloud",
    "hotaisle": "gpu_flows.clouds.hotaisle:HotAisleCloud",
    "aws": "gpu_flows.clouds.aws:AwsCloud",
    "runpod": "gpu_flows.clouds.runpod:RunpodCloud",
    "vastai": "gpu_flows.clouds.vastai:VastaiCloud",
}
"""Every cloud: its name, and the module and class of its adapter, imported when it is first opened."""

PLANNED = ("modal",)
"""Clouds that gpu-flows knows of and does not rent from yet."""

ALIASES = {"vast": "vastai"}

_ACCOUNT = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class CloudRef:
    """One account of one cloud, as users write it: ``runpod`` or ``runpod@team_a``.

    Attributes:
        cloud: Name of the cloud.
        account: Airflow connection id, Prefect block or profile of the command line.
    """

    cloud: str
    account: str = "default"

    @classmethod
    def parse(cls, text: str) -> CloudRef:
        """Read a reference.

        Args:
            text: As a user wrote it; case and surrounding spaces do not matter in the cloud's name.

        Raises:
            BadRequest: When there is no such cloud, or the reference is malformed.
        """
        written, at, account = text.strip().partition("@")
        name = written.strip().lower()
        name = ALIASES.get(name, name)
        if at and not _ACCOUNT.fullmatch(account):
            raise BadRequest(f"{text!r} names no account after the @", hint="write cloud or cloud@account")
        if name in CLOUDS:
            return cls(name, account or "default")
        available = ", ".join(CLOUDS)
        if name in PLANNED:
            raise BadRequest(
                f"gpu-flows {_version()} does not rent from {name} yet", hint=f"it rents from: {available}"
            )
        close = difflib.get_close_matches(name, (*CLOUDS, *PLANNED, *ALIASES), n=1)
        raise BadRequest(
            f"there is no cloud {written.strip()!r}",
            hint=f"did you mean {close[0]}?" if close else f"the clouds are: {available}",
        )

    def __str__(self) -> str:
        return account_ref(self.cloud, self.account)


def open_cloud(ref: str | CloudRef, **options: Any) -> Cloud:
    """Open one account of one cloud.

    Args:
        ref: ``cloud`` or ``cloud@account``.
        **options: What the adapter's constructor takes: credentials, folders.

    Returns:
        The adapter; nothing has been asked of the cloud yet.

    Raises:
        BadRequest: When there is no such cloud.
        MissingExtra: When its dependencies are not installed.
    """
    ref = CloudRef.parse(ref) if isinstance(ref, str) else ref
    module, _, attribute = CLOUDS[ref.cloud].partition(":")
    adapter = getattr(importlib.import_module(module), attribute)
    cloud: Cloud = adapter(account=ref.account, **options)
    return cloud


def _version() -> str:
    from importlib.metadata import version

    return version("gpu-flows")
