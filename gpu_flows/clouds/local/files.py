"""Files that a kill cannot leave half written, and folders that are gone when they are removed."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: str, *, mode: int = 0o600) -> None:
    """Write a file so that a reader sees all of it or none, whenever the writer dies.

    Args:
        path: The file; its folder must exist.
        content: The text.
        mode: Permissions, in force before the first byte is written.
    """
    staged = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
        staged.replace(path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object with `write_atomically`."""
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        FileNotFoundError: When there is no such file.
        ValueError: When it holds anything else.
    """
    data = json.loads(path.read_bytes())
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds no JSON object")
    return data


def remove_tree(path: Path) -> None:
    """Remove a folder with everything in it, also what its owner has made unreadable.

    Raises:
        OSError: When something in it cannot be removed, or is mounted there.
    """
    if mounted := _mounts_under(path):
        raise OSError(f"{mounted[0]} is mounted there, and what is mounted is not ours to remove")
    while path.exists():
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            continue  # somebody else removes it too
        except PermissionError:
            if not _make_removable(path):
                raise


def _make_removable(path: Path) -> bool:
    """Open every folder under a path to its owner; tell whether any was closed."""
    changed = False
    todo = [path]
    while todo:
        folder = todo.pop()
        if folder.stat().st_mode & 0o700 != 0o700:
            folder.chmod(0o700)
            changed = True
        todo += [Path(entry) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    return changed


def _mounts_under(path: Path) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text("utf-8", errors="replace").splitlines()
    # Spaces and the like are written as octal numbers.
    targets = [re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), line.split()[4]) for line in lines]
    return [target for target in targets if target.startswith(f"{path.resolve()}/")]
