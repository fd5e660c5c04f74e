"""What a droplet does at boot, and how it destroys itself: only where a token for that may lie on it."""

from __future__ import annotations

import json
import shlex

_TOKEN = ".gpu-flows/token"  # noqa: S105 - where it lies, in the home of root


def user_data(token: str, boot_script: str) -> str:
    """Return cloud-init's user data, which puts the token on the droplet and starts the dead-man at every boot.

    Args:
        token: May lie on the droplet; whoever is on it can read it, here and in the metadata.
        boot_script: POSIX sh.
    """
    lines = [
        ': "${HOME:=/root}"',  # cloud-init sets none
        "export HOME",
        f'(umask 077; mkdir -p "$HOME/.gpu-flows"; printf %s {shlex.quote(token)} >"$HOME/{_TOKEN}")',
        boot_script,
    ]
    # bootcmd, unlike a script, runs at every boot; as text, and not a list of words, it is in no command line.
    return f"#cloud-config\n{json.dumps({'bootcmd': [chr(10).join(lines)]})}\n"


def self_destruct_text(*, api: str, metadata: str) -> str:
    """Return POSIX sh by which a droplet destroys itself; it holds no token.

    Args:
        api: Base URL of the API.
        metadata: Base URL of the metadata service.
    """
    return (
        f"id=$(curl -fsS -m 20 {metadata}/metadata/v1/id) && "
        # The token goes through a pipe: a command line can be read by every process.
        f'printf \'header = "Authorization: Bearer %s"\\n\' "$(cat "$HOME/{_TOKEN}")" | '
        f'curl -fsS -m 40 -X DELETE -K - "{api}/v2/droplets/$id"'
    )
