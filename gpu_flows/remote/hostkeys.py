"""Host keys: which algorithms are asked for, and whether a key is the pinned one.

A key is pinned at the first contact and compared at every later one. The user's known_hosts is neither
read nor written: clouds reuse addresses, so what it says about one may be about another machine (boto#2027,
lisa#1703).
"""

from __future__ import annotations

_RSA = ("rsa-sha2-512", "rsa-sha2-256")

# Ed25519 first. Certificates are left out, since a pin is of a key.
ALGORITHMS = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", *_RSA)


def algorithms_for(pinned: str | None) -> list[str]:
    """Return the host key algorithms in the order to ask for them.

    The client's order decides. The pinned kind comes first, or a server with several keys would show another
    one than at the first contact; the others follow, so that a machine without that kind shows what it has
    and is told from one that merely hangs up.
    """
    if pinned is None:
        return list(ALGORITHMS)
    kind = pinned.split()[0]
    first = _RSA if kind == "ssh-rsa" else (kind,)
    return [*first, *(other for other in ALGORITHMS if other not in first)]


def same_key(pinned: str, shown: str) -> bool:
    """Tell whether two keys in ``"<algorithm> <base64> [comment]"`` form are the same key."""
    return pinned.split()[:2] == shown.split()[:2]
