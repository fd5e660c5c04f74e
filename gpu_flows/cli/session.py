"""The installation that a verb works with, and how owners are named for people."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpu_flows.cli.output import Output
from gpu_flows.errors import BadRequest

if TYPE_CHECKING:
    from gpu_flows.leases.lease import Owner
    from gpu_flows.runs.installation import Installation


def installation(output: Output, **options: Any) -> Installation:
    """Return this user's installation, whose events go to the screen."""
    from gpu_flows.runs.installation import Installation

    return Installation(makes_namespace=True, listener=output.screen, **options)


def owner_named(text: str | None) -> Owner:
    """Return the owner that ``--owner`` names.

    Raises:
        BadRequest: When none was named, or the text is none.
    """
    from gpu_flows.leases.lease import Owner

    if not text:
        raise BadRequest("whose boxes?", hint="--owner NAME; `gpu-flows ps` lists the owners")
    return Owner.parse(text)


def clouds_of(given: Mapping[str, Any]) -> list[str] | None:
    """Return the clouds that ``--clouds`` and ``--provider`` name; None without them."""
    from gpu_flows.clouds import CloudRef

    told = given.get("clouds") or ()
    texts = [
        *([told] if isinstance(told, str) else told),
        *([given["provider"]] if "provider" in given else []),
    ]
    return [str(CloudRef.parse(part)) for text in texts for part in text.split(",") if part.strip()] or None


def fresh_name(entrypoint: str) -> str:
    """Return a name for a new owner that a person can type: ``train-3f9a2c``."""
    stem = re.sub(r"[^a-z0-9]+", "-", entrypoint.rpartition("/")[2].removesuffix(".py").lower()).strip("-")
    return f"{stem[:24] or 'run'}-{secrets.token_hex(3)}"


def shown(owner: Owner | None, lease: str | None = None) -> str:
    """Return an owner as people write it behind ``--owner``."""
    if owner is None:
        return f"(lease {lease})" if lease else "?"
    return owner.parts[1] if owner.parts[0] == "cli" and len(owner.parts) == 2 else str(owner)


def command_for(verb: str, owner: Owner) -> str:
    """Return a command line that a user can paste."""
    import shlex

    return f"gpu-flows {verb} --owner {shlex.quote(shown(owner))}"
