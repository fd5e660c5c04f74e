"""The secret from which the SSH keys to local boxes derive."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from gpu_flows.clouds.errors import CloudError
from gpu_flows.clouds.local.files import write_atomically


def identity_secret(root: Path) -> bytes:
    """Return the secret of a registry, made at the first call and kept in a file of mode 0600.

    Args:
        root: The registry's folder.

    Raises:
        CloudError: When it cannot be made, or others could read it.
    """
    path = root / "identity"
    try:
        if not path.exists():
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh = path.with_name(f".identity.{os.getpid()}.{secrets.token_hex(4)}")
            write_atomically(fresh, secrets.token_hex(32) + "\n")
            # A hard link fails where the name is taken: two first calls at once agree on one secret.
            with contextlib.suppress(FileExistsError):
                os.link(fresh, path)
            fresh.unlink()
        secret = path.read_bytes().strip()
        mode = path.stat().st_mode
    except OSError as error:
        raise CloudError(f"the secret {path} cannot be made or read: {error.strerror}") from error
    if mode & 0o077:
        raise CloudError(f"others can read the secret {path}", hint=f"chmod 600 {path}")
    if len(secret) < 32:
        raise CloudError(
            f"the secret {path} is damaged", hint="remove it when no local box is alive any more"
        )
    return secret
