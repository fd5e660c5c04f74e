"""The regions of AWS by the names that people use for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpu_flows.clouds.errors import NotOffered
from gpu_flows.errors import BadRequest
from gpu_flows.offers import resolve_regions

_NAMES = {
    "virginia": ("us-east-1",),
    "ohio": ("us-east-2",),
    "california": ("us-west-1",),
    "oregon": ("us-west-2",),
    "ireland": ("eu-west-1",),
    "london": ("eu-west-2",),
    "paris": ("eu-west-3",),
    "frankfurt": ("eu-central-1",),
    "stockholm": ("eu-north-1",),
    "tokyo": ("ap-northeast-1",),
    "seoul": ("ap-northeast-2",),
    "mumbai": ("ap-south-1",),
    "singapore": ("ap-southeast-1",),
    "sydney": ("ap-southeast-2",),
}
_CONTINENTS = {"europe": "eu", "asia": "ap", "canada": "ca", "usa": "us"}


def aliases(known: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return friendly names: cities, and every beginning of a name (``eu``, ``us-west``) for all that have it."""
    table: dict[str, tuple[str, ...]] = {}
    for region in sorted(known):
        parts = region.split("-")
        for length in range(1, len(parts)):
            beginning = "-".join(parts[:length])
            table[beginning] = (*table.get(beginning, ()), region)
    table |= {name: table[code] for name, code in _CONTINENTS.items() if code in table}
    return table | _NAMES


def asked_regions(asked: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Return AWS's names for the regions that a user wrote, resolved once for every call.

    A name that AWS does not have may be another cloud's, so it is passed over as long as one of them is AWS's.

    Args:
        asked: As written; empty for no choice.
        known: Every region of the partition.

    Raises:
        NotOffered: When none of them is a region of AWS; it lists those that are.
    """
    table = aliases(known)
    found: list[str] = []
    last: BadRequest | None = None
    for name in asked:
        try:
            found += resolve_regions([name], known, aliases=table)
        except BadRequest as error:
            last = error
    if last is not None and not found:
        raise NotOffered(f"aws: {last.message}", hint=last.hint) from last
    return tuple(dict.fromkeys(found))
