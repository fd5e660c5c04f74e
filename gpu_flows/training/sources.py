"""Are the files of a spec there, and fit to run? Asked before anything is rented."""

from __future__ import annotations

import difflib
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from gpu_flows.errors import BadRequest
from gpu_flows.training.spec import Kind, TrainingSpec


@dataclass(frozen=True, slots=True)
class Sources:
    """What is uploaded for a spec.

    Attributes:
        path: The folder, or the single file, to upload; absolute.
        advice: What a person may want to change before the run, a sentence each.
    """

    path: Path
    advice: tuple[str, ...] = ()


def check_sources(spec: TrainingSpec) -> Sources:
    """Find the files that a spec names.

    Returns:
        What to upload.

    Raises:
        BadRequest: When a file is missing, lies elsewhere than the box will look, or cannot run there.
    """
    path = _upload(spec)
    scripts = _shell_scripts(spec, path)
    for script in scripts:
        if b"\r\n" in script.read_bytes():
            raise BadRequest(
                f"{script} has Windows line ends (CRLF), with which no line of it means what it says on the box",
                hint=f"sed -i 's/\\r$//' {shlex.quote(str(script))}",
            )
    return Sources(path, tuple(advice for script in scripts if (advice := _pipe_advice(script))))


def _upload(spec: TrainingSpec) -> Path:
    code = spec.code.expanduser() if spec.code else None
    if spec.kind in (Kind.MODULE, Kind.SHELL_LINE):
        path = (code or Path()).resolve()
        if not path.exists():
            raise BadRequest(f"code: {code} is not there")
        if spec.kind is Kind.MODULE:
            _check_module(path, spec.target)
    elif code is None:
        script = Path(spec.entrypoint).expanduser()
        if not script.is_file():
            raise _missing_script(spec, script)
        path = script.resolve().parent
    else:
        path = code.resolve()
        script = path if path.is_file() and path.name == spec.target else path / spec.target
        if not path.exists():
            raise BadRequest(f"code: {code} is not there")
        if not script.is_file():
            raise _missing_script(spec, script)
    if path in (Path.home(), Path(path.anchor)):
        raise BadRequest(
            f"code: {path} is too much to upload",
            hint="put the code into a folder of its own, or name one by code",
        )
    return path


def _missing_script(spec: TrainingSpec, script: Path) -> BadRequest:
    """Say that a script is missing, and which of the usual slips it looks like."""
    hint = None
    if spec.code is not None and Path(spec.entrypoint).is_file():
        inside = Path(spec.entrypoint).resolve()
        code = spec.code.expanduser().resolve()
        if inside.is_relative_to(code):
            hint = f"entrypoint is relative to code: write {inside.relative_to(code).as_posix()}"
    elif script.parent.joinpath(*spec.entrypoint.split(".")).with_suffix(".py").is_file():
        hint = f"a module is written with -m: entrypoint='-m {spec.entrypoint}'"
    return BadRequest(f"entrypoint: {script} is not there", hint=hint)


def _check_module(folder: Path, name: str) -> None:
    """Refuse a module that is none of the user's own and reads like a slip.

    A package that the folder has no trace of may be installed on the box (``-m lightning.pytorch.cli``).
    """
    first, *rest = name.split(".")
    roots = [root for root in (folder, folder / "src") if root.is_dir()]
    own = {path.stem: path for root in reversed(roots) for path in root.iterdir() if _is_importable(path)}
    if first in own:
        target = own[first].joinpath(*rest)
        known = target.is_dir() or target.with_suffix(".py").is_file()
        hint = None
    else:
        near = difflib.get_close_matches(first, own, 1, 0.7)
        known = bool(rest) and not near
        hint = f"did you mean {'.'.join([near[0], *rest])}?" if near else None
    if not known:
        raise BadRequest(
            f"entrypoint: there is no module {name} in {folder}",
            hint=hint or "code is the folder that holds the package, or that has it in src/",
        )


def _is_importable(path: Path) -> bool:
    return path.suffix == ".py" or (path.is_dir() and path.name.isidentifier())


def _shell_scripts(spec: TrainingSpec, path: Path) -> list[Path]:
    """Return the shell files that the entrypoint runs, as far as its words tell."""
    if spec.kind is Kind.SHELL_FILE:
        return [path if path.is_file() else path / spec.target]
    if spec.kind is not Kind.SHELL_LINE:
        return []
    try:
        words = shlex.split(spec.target)
    except ValueError:  # bash knows more quotes than shlex does, and will have its say
        return []
    return [script for word in words if word.endswith(".sh") and (script := path / word).is_file()]


def _pipe_advice(script: Path) -> str | None:
    text = script.read_text(encoding="utf-8", errors="replace")
    if re.search(r"^[^#\n]*\|\s*tee\b", text, re.M) and "pipefail" not in text:
        return (
            f"{script.name} pipes into tee without `set -o pipefail`: "
            "it will look successful when what stands before the pipe fails"
        )
    return None
