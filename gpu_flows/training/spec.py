"""What is to be run on the boxes: the same names in Python, in a TOML file and as CLI flags.

Pure but for `TrainingSpec.from_toml`, which reads its file. Whether the files that a spec names are there
is the business of `gpu_flows.training.sources`.
"""

from __future__ import annotations

import difflib
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from gpu_flows.errors import BadRequest

SecretLookup = Callable[[str], str | None]
"""Returns the value behind a secret's source, or None when there is none (``os.environ.get`` is one)."""


class Launcher(StrEnum):
    """What starts the processes of a node."""

    TORCHRUN = "torchrun"
    """One process per GPU, each with a rank: the default."""
    PYTHON = "python"
    """One process on one box, without ranks: for scripts that start their own (Lightning, mp.spawn)."""
    COMMAND = "command"
    """A line for bash, once per box: the default for a ``.sh`` file."""


class Kind(StrEnum):
    """What an entrypoint names."""

    FILE = "a Python file"
    MODULE = "a module"
    SHELL_FILE = "a shell file"
    SHELL_LINE = "a line for the shell"


class MissingSecrets(BadRequest):
    """Secrets that the job needs cannot be found; nothing was rented.

    Args:
        names: The secrets that were not found.
    """

    code = "MISSING_SECRETS"

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"no value for the secret{'s'[: len(names) > 1]} {', '.join(names)}",
            hint="set the environment variable, or name another source: secrets={'NAME': 'SOURCE'}",
        )
        self.names = tuple(names)


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LONGEST_BYTES = 128 * 1024 - 64
"""MAX_ARG_STRLEN of Linux, which for a variable includes its name."""
_READ_ONLY = {"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"}
_MODULE = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_DURATION = re.compile(r"(?:([\d.]+)d)?(?:([\d.]+)h)?(?:([\d.]+)m)?(?:([\d.]+)s?)?")
_SHELL_CHARACTERS = re.compile(r"[\s'\"`$;&|<>()\\*?]")
_PROGRAMS = {"python", "python3", "torchrun", "accelerate", "bash", "sh", "uv"}
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|(?:API|ACCESS|PRIVATE)_?KEY", re.I)
_SECRET_VALUE = re.compile(
    r"://[^/\s:@]*:[^/\s@]+@|^(?:hf_|sk-|ghp_|github_pat_|glpat-|xox[abp]-|AKIA)\w{4,}"
)


def _number_as_text(value: Any) -> Any:
    """Let a number stand for its text: ``args = ["--epochs", 3]`` in TOML."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _passable(value: str) -> str:
    """Refuse what the kernel passes to no program, in an argument or in the environment."""
    if "\0" in value:
        raise ValueError("contains a NUL byte, which no program can be given")
    if len(value.encode()) >= _LONGEST_BYTES:
        raise ValueError("is too long: no program can be given more than 128 KiB at once; put it into a file")
    return value


def _filled(value: str) -> str:
    if not value.strip():
        raise ValueError("is empty")
    return value


def _variable(name: str) -> str:
    if not _VARIABLE.fullmatch(name):
        raise ValueError("is not the name of an environment variable: letters, digits and _ only")
    if name.startswith("GPU_FLOWS_"):
        raise ValueError("begins with GPU_FLOWS_, which gpu-flows keeps for itself")
    if name in _READ_ONLY:
        raise ValueError("is read-only in bash")
    return name


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _words(value: Any) -> Any:
    """Split a single string once, as a POSIX shell would; a list is left byte for byte as it is."""
    if not isinstance(value, str):
        return value
    try:
        return shlex.split(value)
    except ValueError as error:
        raise ValueError(f"cannot be split into words ({error})") from error


def _sources_by_name(value: Any) -> Any:
    """Turn a list of secrets into the table of where each comes from: its own name."""
    value = _listed(value)
    if isinstance(value, Iterable) and any(_SECRET_VALUE.search(str(name)) for name in value):
        raise ValueError("one looks like a secret itself; give the name of the variable that holds it")
    return {name: name for name in value} if isinstance(value, Sequence) else value


def _duration(value: Any) -> Any:
    """Read ``90``, ``6h``, ``1d2h30m``; seconds as a number and ISO 8601 are pydantic's own."""
    if not isinstance(value, str) or not (text := "".join(value.lower().split())):
        return value
    if not (match := _DURATION.fullmatch(text)):
        return value
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)


def _local_folder(value: Any) -> Any:
    if isinstance(value, str) and "://" in value:
        raise ValueError("has to be a folder of this machine, not a URL")
    return value


_Text = Annotated[str, BeforeValidator(_number_as_text), AfterValidator(_passable)]
_Filled = Annotated[_Text, AfterValidator(_filled)]
_Variable = Annotated[_Text, AfterValidator(_variable)]
_Listed = Annotated[tuple[_Filled, ...], BeforeValidator(_listed)]


class TrainingSpec(BaseModel):
    """A training job: what to run, with which arguments and environment, and what to bring back.

    Every wrong field is a `BadRequest` that names it. Values of ``env`` are kept out of its repr.

    Attributes:
        entrypoint: A Python file (``train.py``), a module (``-m acme.train``), a shell file (``train.sh``) or,
            with ``launcher="command"``, a line for bash. A file is relative to ``code``.
        args: Arguments of the script, passed on byte for byte. A single string is split once into words by
            the rules of a POSIX shell (`shlex.split`); numbers stand for their text.
        env: Environment variables for the job; numbers stand for their text. Not the place for secrets.
        secrets: Names of secrets, looked up late where gpu-flows runs, and set as variables of the job; or a
            table from the variable's name to the source to look up.
        launcher: What starts the processes; torchrun, or command for a ``.sh`` file.
        nodes: Number of boxes.
        nproc_per_node: Processes on each box; by default one per GPU used, or on CPU boxes the N of "cpu:N".
        image: Image of the box, one for all clouds or a table per cloud.
        code: Folder or single file to upload; by default the entrypoint's folder, or for a module or a line
            the current folder. It becomes the working directory of the job.
        include: Globs, relative to ``code``, of files to upload although git ignores them.
        setup: Commands for bash, run one after the other before the start, each in the working directory.
        outputs: Globs of files to fetch when the job has ended, however it ended; relative to the working
            directory, or beginning with ``~/``.
        outputs_to: Folder for them; by default the folder of the run.
        max_duration: Longest time the job may run: seconds, "6h", "1d2h30m", or ISO 8601.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    entrypoint: _Filled
    args: Annotated[tuple[_Text, ...], BeforeValidator(_words)] = ()
    env: Mapping[_Variable, _Text] = Field(default_factory=dict, repr=False)
    secrets: Annotated[Mapping[_Variable, _Filled], BeforeValidator(_sources_by_name)] = Field(
        default_factory=dict
    )
    launcher: Launcher = Launcher.TORCHRUN
    nodes: int = Field(default=1, ge=1, le=99)
    nproc_per_node: int | None = Field(default=None, ge=1, le=1024)
    image: _Filled | Mapping[str, _Filled] | None = None
    code: Path | None = None
    include: _Listed = ()
    setup: _Listed = ()
    outputs: _Listed = ()
    outputs_to: Annotated[Path | None, BeforeValidator(_local_folder)] = None
    max_duration: Annotated[timedelta, BeforeValidator(_duration)] = Field(
        default=timedelta(hours=24), gt=timedelta(0)
    )

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise _bad_request(error) from None  # its text is all in ours; its input may hold values of env

    @classmethod
    def from_toml(cls, path: Path | str) -> Self:
        """Read a spec from a TOML file: its ``[training]`` table, or the whole file when it has none.

        Relative paths (``code``, ``outputs_to``) stand for paths beside the file.

        Raises:
            BadRequest: When the file cannot be read or a field is wrong.
        """
        path = Path(path)
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise BadRequest(f"{path} cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BadRequest(f"{path} is not valid TOML: {error}") from error
        fields = table.get("training", table)
        if not isinstance(fields, dict):
            raise BadRequest(f"{path}: training has to be a table")
        try:
            return cls(**fields)._beside(path.parent)
        except BadRequest as error:
            raise BadRequest(f"{path}: {error.message}", hint=error.hint) from error

    def to_json(self) -> dict[str, Any]:
        """Return the spec as plain JSON values that build it again; no secret, but the values of ``env``."""
        return self.model_dump(mode="json")

    def redacted(self) -> dict[str, Any]:
        """Return `to_json` for showing and storing: values of ``env`` that look like secrets are masked."""
        hidden = self.sensitive_values()
        data = self.to_json()
        data["env"] = {name: "***" if value in hidden else value for name, value in self.env.items()}
        return data

    def sensitive_values(self) -> tuple[str, ...]:
        """Return the values of ``env`` that look like secrets by name or shape: best effort, for masking."""
        return tuple(
            value
            for name, value in self.env.items()
            if value and (_SECRET_NAME.search(name) or _SECRET_VALUE.search(value))
        )

    def resolve_secrets(self, lookup: SecretLookup) -> dict[str, str]:
        """Look all secrets up.

        Args:
            lookup: Returns the value behind a source, or None.

        Raises:
            MissingSecrets: Naming every one that has no value, or an empty one.
        """
        values = {name: lookup(source) for name, source in self.secrets.items()}
        # The source is not named: somebody may have written the secret itself there.
        if missing := [name for name, value in values.items() if not value]:
            raise MissingSecrets(missing)
        return {name: value for name, value in values.items() if value}

    def processes(self, *, gpus: int, cpus: int = 0) -> int:
        """Return how many processes one box runs.

        Args:
            gpus: GPUs used on the box.
            cpus: The N of "cpu:N" on a box without GPUs.
        """
        return 1 if self.launcher is Launcher.PYTHON else self.nproc_per_node or gpus or cpus or 1

    def image_for(self, cloud: str) -> str | None:
        """Return the image to boot on a cloud, or None for the cloud's default."""
        return self.image.get(cloud) if isinstance(self.image, Mapping) else self.image

    @property
    def kind(self) -> Kind:
        """What the entrypoint names."""
        if self.entrypoint.startswith("-m "):
            return Kind.MODULE
        is_shell_file = self.entrypoint.endswith(".sh")
        if self.launcher is Launcher.COMMAND and not (is_shell_file and _is_plain(self.entrypoint)):
            return Kind.SHELL_LINE
        return Kind.SHELL_FILE if is_shell_file else Kind.FILE

    @property
    def target(self) -> str:
        """The entrypoint as the box knows it: a path within the upload, a module's name, or the line."""
        match self.kind:
            case Kind.MODULE:
                return self.entrypoint[3:].strip()
            case Kind.SHELL_LINE:
                return self.entrypoint
        path = PurePosixPath(self.entrypoint)
        return path.name if self.code is None else str(path)

    @model_validator(mode="before")
    @classmethod
    def _launcher_of_a_shell_file(cls, fields: Any) -> Any:
        entrypoint = fields.get("entrypoint") if isinstance(fields, Mapping) else None
        if isinstance(entrypoint, Path):
            fields = {**fields, "entrypoint": (entrypoint := str(entrypoint))}
        if isinstance(entrypoint, str) and entrypoint.endswith(".sh") and fields.get("launcher") is None:
            if not _is_plain(entrypoint):
                line = f"bash {shlex.quote(entrypoint)}"
                raise ValueError(
                    f"entrypoint: quote the name for bash: launcher='command', entrypoint={line!r}"
                )
            return {**fields, "launcher": Launcher.COMMAND}
        return fields

    @field_validator("max_duration", mode="wrap")
    @classmethod
    def _readable_duration(cls, value: Any, handler: Callable[[Any], timedelta]) -> timedelta:
        try:
            return handler(value)
        except ValidationError as error:
            raise ValueError('has to be a time above zero: seconds, "6h", "1d2h30m", or ISO 8601') from error

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if both := sorted(self.env.keys() & self.secrets.keys()):
            raise ValueError(f"secrets: {both[0]} is in env as well")
        if self.launcher is Launcher.PYTHON and (self.nodes > 1 or (self.nproc_per_node or 1) > 1):
            field = "nodes" if self.nodes > 1 else "nproc_per_node"
            raise ValueError(
                f"{field}: launcher 'python' is one process on one box; use 'torchrun' or 'command'"
            )
        match self.kind:
            case Kind.MODULE if not _MODULE.fullmatch(self.target):
                raise ValueError(
                    f"entrypoint: {self.target!r} is not the name of a module; arguments go into args"
                )
            case Kind.FILE | Kind.SHELL_FILE:
                _check_script(self.entrypoint, self.code)
        return self

    def _beside(self, folder: Path) -> Self:
        """Return the spec with its relative paths taken from a folder."""
        moved: dict[str, Any] = {}
        if self.outputs_to is not None:
            moved["outputs_to"] = folder / self.outputs_to.expanduser()
        if self.code is not None:
            moved["code"] = folder / self.code.expanduser()
        elif self.kind in (Kind.FILE, Kind.SHELL_FILE):
            moved["code"] = (folder / self.entrypoint).parent
            moved["entrypoint"] = self.target
        else:
            moved["code"] = folder
        return self.model_copy(update=moved)


def _is_plain(text: str) -> bool:
    return not _SHELL_CHARACTERS.search(text)


def _check_script(entrypoint: str, code: Path | None) -> None:
    """Refuse what is not the name of a script that lies within the upload."""
    first, *rest = entrypoint.split()
    if rest and (first in _PROGRAMS or first.endswith((".py", ".sh"))):
        raise ValueError(
            "entrypoint: names the script alone; the launcher starts it, and its arguments go into args"
        )
    if code is not None:
        path = PurePosixPath(entrypoint)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"entrypoint: {entrypoint} has to be relative to code and inside of it")


def _bad_request(error: ValidationError) -> BadRequest:
    """Put pydantic's findings into one sentence, without the values that it found."""
    findings = []
    for detail in error.errors(include_url=False, include_input=False):
        if detail["loc"][-1:] == ("str",):  # the text half of "text or table"; the other half says enough
            continue
        # Markers of pydantic's own ("[key]", the members of a union) are no names of the user's.
        path = ".".join(str(part) for part in detail["loc"] if str(part) != "str" and "[" not in str(part))
        reason = _reason(detail)
        findings.append(f"{path}: {reason}" if path else reason)
    return BadRequest(f"the training spec is wrong: {'; '.join(dict.fromkeys(findings))}")


def _reason(detail: ErrorDetails) -> str:
    limits = detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            near = difflib.get_close_matches(str(detail["loc"][-1]), list(TrainingSpec.model_fields), 1, 0.7)
            return f"there is no such field; did you mean {near[0]}?" if near else "there is no such field"
        case "value_error":
            return str(limits["error"])
        case "missing":
            return "is missing"
        case "string_type":
            return "has to be text"
        case "enum":
            return f"has to be {limits['expected']}"
        case "greater_than_equal":
            return f"has to be at least {limits['ge']}"
        case "less_than_equal":
            return f"has to be at most {limits['le']}"
        case "int_type" | "int_parsing" | "int_from_float":
            return "has to be a whole number"
    return detail["msg"][:1].lower() + detail["msg"][1:]
