"""Which files of a folder are code: what git would commit where git knows the folder, a sane default elsewhere."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from gpu_flows.errors import BadRequest

_GIT_TIMEOUT_S = 120

# Never code, whoever forgot to ignore it. Virtual environments are told by their pyvenv.cfg.
_NEVER = frozenset(
    {
        ".git", ".hg", ".svn", "__pycache__", "node_modules", ".mypy_cache", ".pytest_cache", ".ruff_cache",
        ".ipynb_checkpoints", ".tox", ".nox", ".eggs", ".DS_Store",
    }
)  # fmt: skip
_OURS = ".gpu-flows-"  # markers and staging folders of an upload


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a folder, as paths relative to it.

    Attributes:
        files: What is code, links included; folders only where they are empty.
        ignored: What was left out; a folder, with a slash at its end, stands for all that is below it.
        warnings: What the user should know about how it was told apart.
    """

    files: frozenset[str]
    ignored: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def list_code(folder: Path, include: tuple[str, ...] = ()) -> Listing:
    """List the code in a folder.

    Where git knows the folder: tracked files, and untracked ones that git does not ignore (``.gitignore``,
    ``.git/info/exclude``, the user's own excludes), submodules included. Elsewhere: everything but caches,
    virtual environments and the like.

    Args:
        folder: An existing folder.
        include: Globs, relative to the folder, of what is wanted although it is ignored; a folder that
            matches is wanted with all that is below it.

    Raises:
        BadRequest: When a glob matches nothing or leads outside.
    """
    files, ignored, warnings = _list(folder)
    wanted = {path for pattern in include for path in _matching(folder, pattern)}
    files |= wanted
    if wanted:
        ignored = {name for name in ignored if _still_ignored(folder, name, files)}
    return Listing(frozenset(files), tuple(sorted(ignored)), tuple(warnings))


def _list(folder: Path) -> tuple[set[str], set[str], list[str]]:
    """Return files, what is ignored, and warnings."""
    if not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        return *_walk(folder), []
    try:
        if _git(folder, "check-ignore", ".", fine=(0, 1)):
            return *_walk(folder), []  # ignored by the repository around it, where git would list nothing
        return _ask_git(folder)
    except _GitFailed as exc:
        return *_walk(folder), [f"the ignore rules of {folder} were not honoured, because {exc}"]


def _ask_git(folder: Path) -> tuple[set[str], set[str], list[str]]:
    tracked = _split(_git(folder, "ls-files", "-z", "--cached"))
    others = _split(_git(folder, "ls-files", "-z", "--others", "--exclude-standard"))
    ignored = _split(
        _git(folder, "ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")
    )
    files: set[str] = set()
    warnings: list[str] = []
    for name in tracked | others:
        path = folder / name
        cut = next((part for part in _ancestry(name) if _is_never(folder / part)), None)
        if name in others and cut is not None:
            ignored.add(f"{cut}/" if (folder / cut).is_dir() else cut)
        elif path.is_symlink() or path.is_file():
            files.add(name)
        elif (path / ".git").exists():  # a submodule, or a checkout within the checkout
            below, left_out, said = _list(path)
            prefix = name.rstrip("/")
            files |= {f"{prefix}/{inner}" for inner in below}
            ignored |= {f"{prefix}/{inner}" for inner in left_out}
            warnings += said
        elif path.is_dir():
            warnings.append(
                f"the submodule {name} of {folder} is not checked out, so nothing of it is uploaded"
            )
    return files, {name for name in ignored if not name.startswith(_OURS)}, warnings


def _walk(folder: Path) -> tuple[set[str], set[str]]:
    files: set[str] = set()
    ignored: set[str] = set()
    for root, folders, names in os.walk(folder):
        here = Path(root)
        if not folders and not names and here != folder:
            files.add(here.relative_to(folder).as_posix())
        for name in list(folders):
            path = here / name
            if path.is_symlink():
                names.append(name)
                folders.remove(name)
            elif _is_never(path):
                folders.remove(name)
                if not name.startswith(_OURS):
                    ignored.add(f"{path.relative_to(folder).as_posix()}/")
        kept = [name for name in names if not _is_never(here / name)]
        files |= {(here / name).relative_to(folder).as_posix() for name in kept}
    return files, ignored


def _is_never(path: Path) -> bool:
    name = path.name
    return (
        name in _NEVER
        or name.startswith(_OURS)
        or name.endswith((".pyc", ".pyo"))
        or (path / "pyvenv.cfg").is_file()
    )


def _ancestry(name: str) -> list[str]:
    """Return ``a``, ``a/b``, ``a/b/c`` for ``a/b/c``."""
    parts = name.rstrip("/").split("/")
    return ["/".join(parts[: n + 1]) for n in range(len(parts))]


def _matching(folder: Path, pattern: str) -> set[str]:
    """Return the files that an include glob names."""
    parts = Path(pattern).parts
    if not parts or Path(pattern).is_absolute() or ".." in parts:
        raise BadRequest(f"include {pattern!r} has to be a glob below {folder}")
    found: set[str] = set()
    for match in folder.glob(pattern):
        if match.is_dir() and not match.is_symlink():
            found |= {path.relative_to(folder).as_posix() for path in _everything_below(match)}
        else:
            found.add(match.relative_to(folder).as_posix())
    if not found:
        raise BadRequest(f"include {pattern!r} matches nothing in {folder}")
    return found


def _everything_below(folder: Path) -> list[Path]:
    found: list[Path] = []
    for root, folders, names in os.walk(folder):
        links = [name for name in folders if (Path(root) / name).is_symlink()]
        folders[:] = [name for name in folders if name != ".git" and name not in links]
        found += [Path(root) / name for name in (*names, *links)]
    return found


def _still_ignored(folder: Path, name: str, files: set[str]) -> bool:
    if not name.endswith("/"):
        return name not in files
    return any(path.relative_to(folder).as_posix() not in files for path in _everything_below(folder / name))


def _split(listing: bytes) -> set[str]:
    return {os.fsdecode(name) for name in listing.split(b"\0") if name}


class _GitFailed(Exception):
    """Why git did not answer."""


def _git(folder: Path, *arguments: str, fine: tuple[int, ...] = (0,)) -> bytes:
    """Return what git prints.

    Variables of a hook or another repository are kept from it. The folder may belong to another user (a mounted
    volume), which git refuses by default; since nothing may run for that user, a file system monitor that is set
    up in the repository is not run either.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false", *arguments],  # noqa: S607
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError as exc:
        raise _GitFailed("git is not installed") from exc
    except subprocess.TimeoutExpired as exc:
        raise _GitFailed(f"git did not answer within {_GIT_TIMEOUT_S} s") from exc
    if done.returncode not in fine:
        raise _GitFailed(f"git failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
