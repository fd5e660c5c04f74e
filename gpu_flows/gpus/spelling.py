"""When two names mean the same card, and what a mistyped one may have meant.

Names are compared whole. Case never counts, and blanks, dashes and underscores count only between two
digits: ``RTX 4090``, ``rtx-4090`` and ``RTX_4090`` are one name, ``A10-0`` is not ``A100``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_SEPARATORS = re.compile(r"[\s_-]+")


def key(name: str) -> str:
    """Return the form of a name by which names are compared; it is not meant to be shown."""
    text = name.strip().lower()

    def joint(separator: re.Match[str]) -> str:
        start, end = separator.span()
        if start == 0 or end == len(text):
            return "-"  # "H100-" was cut off or mistyped; it is no spelling of H100
        return "-" if text[start - 1].isdigit() and text[end].isdigit() else ""

    return _SEPARATORS.sub(joint, text)


def did_you_mean(name: str, known: Mapping[str, str] | Iterable[str]) -> str | None:
    """Return a hint that names up to three known names like this one, or None when there is none.

    Args:
        name: What was written.
        known: The names that exist; a mapping gives, for each spelling's key, the name to suggest.
    """
    import difflib

    suggestions = known if isinstance(known, Mapping) else {key(each): each for each in known}
    near = difflib.get_close_matches(key(name), suggestions, n=12, cutoff=0.6)
    names = list(dict.fromkeys(suggestions[each] for each in near))[:3]
    return f"did you mean {either(names)}?" if names else None


def either(names: Iterable[str]) -> str:
    """Return ``a``, ``a or b``, or ``a, b or c``."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
