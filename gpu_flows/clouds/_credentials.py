"""Where the keys of an account come from: variables of the environment, one set for each account."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from gpu_flows.clouds.errors import AuthenticationFailed


def variable_for(name: str, account: str) -> str:
    """Return the variable that holds a key of an account.

    Args:
        name: The vendor's own variable: ``RUNPOD_API_KEY``.
        account: ``default``, or what stands after the ``@`` of ``runpod@team_a``.

    Returns:
        The name itself for the default account, else ``RUNPOD_API_KEY__TEAM_A``.
    """
    return name if account == "default" else f"{name}__{re.sub(r'[^A-Z0-9]', '_', account.upper())}"


def secret_from_environment(
    *names: str, account: str, environ: Mapping[str, str] | None = None
) -> str | None:
    """Return the key of an account from the first variable that holds one.

    Args:
        *names: The vendor's variables, the first one first.
        account: Whose key.
        environ: The environment; the process's own unless given.
    """
    environ = os.environ if environ is None else environ
    found = (environ.get(variable_for(name, account), "").strip() for name in names)
    return next(filter(None, found), None)


def previous_secret(*names: str, account: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Return the key that the account had before (``RUNPOD_API_KEY__TEAM_A_PREVIOUS``).

    Boxes that were rented under it still open with the SSH key that was derived from it.
    """
    environ = os.environ if environ is None else environ
    found = (environ.get(f"{variable_for(name, account)}_PREVIOUS", "").strip() for name in names)
    return next(filter(None, found), None)


def no_credentials(cloud: str, *names: str, account: str, also: str = "") -> AuthenticationFailed:
    """Return the error for an account without credentials.

    Args:
        cloud: Name of the cloud.
        *names: The vendor's variables.
        account: Which account.
        also: Another place where they may be.
    """
    ref = cloud if account == "default" else f"{cloud}@{account}"
    places = " or ".join([*(variable_for(name, account) for name in names), *filter(None, [also])])
    return AuthenticationFailed(f"there are no credentials for {ref}", hint=f"set {places}")
