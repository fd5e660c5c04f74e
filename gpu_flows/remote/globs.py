"""Output patterns: what they may name on a box, where to look for it, and what matches."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

_MAGIC = re.compile(r"[*?[]")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern that stays within its base.

    Attributes:
        text: As the user wrote it.
        base: Absolute folder that it is relative to: the job's working directory, or the home.
        path: The rest, normalised; empty for the base itself.
    """

    text: str
    base: str
    path: str

    @property
    def start(self) -> str:
        """The deepest folder or file below which every match lies, absolute."""
        literal: list[str] = []
        for part in self.path.split("/"):
            if _MAGIC.search(part):
                break
            literal.append(part)
        return posixpath.join(self.base, *literal).rstrip("/") or "/"

    def matches(self, path: str) -> bool:
        """Tell whether a file matches: by its own name, or by that of a folder that it is in.

        Args:
            path: Relative to the base.
        """
        if not self.path or path == self.path or path.startswith(f"{self.path}/"):
            return True  # the name itself, even if it holds a bracket
        return _matches(self.path.split("/"), path.split("/"))


def resolve_pattern(text: str, *, cwd: str, home: str) -> Pattern | None:
    """Return what a pattern means on a box, or None when it leads out of what may be fetched.

    A relative one has to stay in the working directory, one with ``~/`` in the home, and an absolute one in
    either.

    Args:
        text: The pattern.
        cwd: The job's working directory, absolute.
        home: The user's home, absolute.
    """
    if text == "~" or text.startswith("~/"):
        return _within(text, home, text[2:])
    if text.startswith("/"):
        whole = posixpath.normpath(text)
        for base in (cwd, home):
            if whole == base or whole.startswith(f"{base}/"):
                return Pattern(text, base, whole[len(base) + 1 :])
        return None
    return _within(text, cwd, text)


def _within(text: str, base: str, rest: str) -> Pattern | None:
    path = posixpath.normpath(rest) if rest else "."
    if path == ".." or path.startswith(("../", "/")):
        return None
    return Pattern(text, base, "" if path == "." else path)


def _matches(pattern: list[str], path: list[str]) -> bool:
    """Match name by name; ``**`` is any number of folders, and at the end everything below."""
    if not pattern:
        return True  # what is left of the path lies in a folder that matches
    head, *rest = pattern
    if head == "**":
        return bool(path) if not rest else any(_matches(rest, path[n:]) for n in range(len(path)))
    return bool(path) and fnmatchcase(path[0], head) and _matches(rest, path[1:])
