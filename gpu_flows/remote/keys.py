"""SSH keys: one pasted into a form made whole again, one read from a file, one derived from a secret.

Whatever is wrong with a key is said before anything is rented, with the file and the reason (C29), and never
with any of its content.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import os
import re
import secrets
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_flows.remote.errors import BadKey

_PUBLIC = re.compile(
    r"^\s*(ssh-(rsa|dss|ed25519)|ecdsa-sha2-\S+|sk-\S+) +AAAA|BEGIN (\w+ )?PUBLIC KEY|BEGIN SSH2 PUBLIC KEY"
)
_ARMOUR = re.compile(r"-----\s*BEGIN ([A-Z0-9 ]+?)\s*-----(.*?)-----\s*END \1\s*-----", re.DOTALL)
_LEGACY_HEADERS = re.compile(r"^\s*Proc-Type:\s*(\S+)\s+DEK-Info:\s*(\S+)\s")

_SALT = b"gpu-flows ssh identity 1"  # the scheme's version: another one yields other keys
_SHORTEST_SECRET_BYTES = 8


@dataclass(frozen=True, slots=True)
class Identity:
    """A key pair in OpenSSH's formats.

    Attributes:
        private_key: The private key as text. Two texts of one key may differ (OpenSSH salts them), so
            identities compare by their public keys.
        public_key: One line, ``ssh-ed25519 AAAA...``, without a comment.
        fingerprint: ``SHA256:...`` as `ssh-keygen -l` prints it.
    """

    private_key: str = field(repr=False, compare=False)
    public_key: str
    fingerprint: str


def normalise_private_key(text: str, source: str, *, passphrase: str | None = None) -> str:
    r"""Return a private key in OpenSSH's format, whatever a form, a copy or an editor did to it.

    Repaired are a literal ``\n``, newlines turned to spaces, indentation, CRLF, a BOM, quotes around it, and a
    missing last newline. RSA, ECDSA and Ed25519 keys are read in PEM, PKCS8 and OpenSSH's format.

    Args:
        text: The key.
        source: Where it comes from, for the error: a path, or the name of a field.
        passphrase: What it is encrypted with.

    Raises:
        BadKey: Naming the source and the reason.
    """
    import asyncssh

    try:
        key = asyncssh.import_private_key(_whole_again(text, source), passphrase)
    except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as exc:
        if "Passphrase must" in str(exc):
            raise BadKey(
                f"{source}: this private key needs a passphrase",
                hint="give its passphrase, or a key without one (ssh-keygen -p -f KEY removes it)",
            ) from exc
        if passphrase is not None:
            raise BadKey(f"{source}: the passphrase does not open this private key: {exc}") from exc
        raise BadKey(f"{source}: this private key cannot be read: {exc}", hint=_CONVERT) from exc
    return str(key.export_private_key("openssh").decode())


def read_private_key(path: Path, *, passphrase: str | None = None) -> str:
    """Return the private key in a file, normalised.

    Raises:
        BadKey: Naming the file and the reason.
    """
    try:
        text = path.expanduser().read_bytes().decode("utf-8-sig")
    except FileNotFoundError as exc:
        raise BadKey(f"{path}: there is no such private key file") from exc
    except OSError as exc:
        raise BadKey(f"{path}: the private key file cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise BadKey(f"{path}: this is not a private key in text form", hint=_CONVERT) from exc
    return normalise_private_key(text, str(path), passphrase=passphrase)


def identity_of(private_key: str) -> Identity:
    """Return the whole identity of a normalised private key."""
    import asyncssh

    return _identity(asyncssh.import_private_key(private_key))


def derive_identity(secret: bytes, namespace: str, account: str) -> Identity:
    """Derive an Ed25519 identity from a secret: whoever holds it computes the same key, so none has to travel.

    HKDF-SHA256 (RFC 5869), salted with the scheme's version, for the namespace and account.

    Args:
        secret: The cloud's static secret, such as its API key.
        namespace: Of the installation.
        account: Of the cloud, such as ``"runpod@default"``.

    Raises:
        BadKey: When the secret is too short to be one.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    if len(secret) < _SHORTEST_SECRET_BYTES:
        raise BadKey(f"the secret of {account} is too short to derive an SSH key from it")
    info = json.dumps([namespace, account]).encode()
    seed = HKDF(algorithm=SHA256(), length=32, salt=_SALT, info=info).derive(secret)
    pem = Ed25519PrivateKey.from_private_bytes(seed).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
    return identity_of(pem.decode())


def load_or_create_identity(path: Path) -> Identity:
    """Return the identity in a file, made on first use with mode 0600.

    Two processes that make it at once end up with the same one.

    Raises:
        BadKey: When the file holds something else.
    """
    import asyncssh

    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(asyncssh.generate_private_key("ssh-ed25519").export_private_key("openssh"))
            with contextlib.suppress(FileExistsError):
                os.link(fresh, path)  # unlike rename, this never replaces the one that another process made
        finally:
            fresh.unlink()
    return identity_of(read_private_key(path))


def _identity(key: Any) -> Identity:
    key.set_comment(None)
    return Identity(
        private_key=key.export_private_key("openssh").decode(),
        public_key=key.export_public_key("openssh").decode().strip(),
        fingerprint=key.get_fingerprint(),
    )


_CONVERT = (
    "ssh-keygen -p -m PEM -f KEY rewrites an OpenSSH key, puttygen KEY.ppk -O private-openssh one of PuTTY"
)


def _whole_again(text: str, source: str) -> str:
    """Return the key with its lines as they were."""
    text = text.replace("\\r", "").replace("\\n", "\n").lstrip("\ufeff").strip().strip("\"'").strip()
    if not text:
        raise BadKey(f"{source}: the private key is empty")
    if text.startswith("PuTTY-User-Key-File"):
        raise BadKey(f"{source}: this is a PuTTY key, which SSH does not read", hint=_CONVERT)
    armour = _ARMOUR.search(text)
    if _PUBLIC.search(text) and (armour is None or "PUBLIC" in armour[1]):
        raise BadKey(
            f"{source}: this is a public key; the private key is wanted",
            hint="it is the file of the same name without .pub",
        )
    if armour is None:
        if "PRIVATE KEY" in text:
            raise BadKey(
                f"{source}: the private key is incomplete: its END or BEGIN line is missing or damaged"
            )
        raise BadKey(f"{source}: this is not a private key: no BEGIN ... PRIVATE KEY line is in it")
    kind, body = armour[1], armour[2]
    if not kind.endswith("PRIVATE KEY"):
        raise BadKey(f"{source}: this is a {kind.lower()}, not a private key")
    headers = _LEGACY_HEADERS.match(body)
    head = f"Proc-Type: {headers[1]}\nDEK-Info: {headers[2]}\n\n" if headers else ""
    packed = re.sub(r"\s+", "", body[headers.end() :] if headers else body)
    try:
        base64.b64decode(packed, validate=True)
    except binascii.Error as exc:
        raise BadKey(f"{source}: the private key is damaged: its body is not base64") from exc
    lines = "\n".join(textwrap.wrap(packed, 64))
    return f"-----BEGIN {kind}-----\n{head}{lines}\n-----END {kind}-----\n"
