"""What was asked for: flags, over a TOML file, as the parameters that every other surface has."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_flows.cli.flags import FOLLOWING, MAX_COST, MAX_PREEMPTIONS, OWNER, RENTING, TRAINING
from gpu_flows.cli.verbs import Given
from gpu_flows.errors import BadRequest

if TYPE_CHECKING:
    from gpu_flows.runs.rental import Rental
    from gpu_flows.settings import Settings
    from gpu_flows.training.spec import TrainingSpec

_SHARED = ("nodes", "image", "max_duration")
"""What a box is rented for and a job is run with: both tables of a file may hold it."""
_RENTING = {flag.name for flag in (*RENTING, MAX_COST)}
_FOLLOWING = {flag.name for flag in (*FOLLOWING, MAX_PREEMPTIONS, OWNER)}
_TRAINING = {flag.name for flag in TRAINING} - {"module", "config"} | {"args", *_SHARED}
_PATHS = ("code", "outputs_to")


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for.

    Attributes:
        training: Fields of `TrainingSpec`.
        renting: Parameters of `gpu_flows.runs.rental.rental`, without those that are fields of `training` too.
        following: The owner, and how the job is followed.
    """

    training: dict[str, Any]
    renting: dict[str, Any]
    following: dict[str, Any]

    @classmethod
    def of(cls, given: Given) -> Asked:
        """Read flags, and the file that ``--config`` names; flags win.

        Raises:
            BadRequest: When the file cannot be read, or a flag not understood.
        """
        said = _understood(given)
        told = _read(Path(said.pop("config")), said) if "config" in said else {}
        # Tables are joined, so that one more variable does not drop those of the file.
        for name in ("env", "secrets"):
            if isinstance(told.get(name), Mapping) and name in said:
                said[name] = {**told[name], **said[name]}
        merged = {**told, **said}
        return cls(
            training={name: value for name, value in merged.items() if name in _TRAINING},
            renting={name: value for name, value in merged.items() if name in _RENTING - set(_SHARED)},
            following={name: value for name, value in merged.items() if name in _FOLLOWING},
        )

    @property
    def parameters(self) -> dict[str, Any]:
        """Return what `gpu_flows.runs.run.run` takes: all but the owner and the following.

        Raises:
            BadRequest: When no GPU or nothing to run was named.
        """
        if "gpus" not in self.renting:
            raise BadRequest("no GPU was asked for", hint="--gpus H100:8, or --gpus cpu for this machine")
        if "entrypoint" not in self.training:
            raise BadRequest("nothing to run", hint="name a file: gpu-flows run train.py --gpus H100:8")
        return {**self.renting, **self.training}

    def spec(self) -> TrainingSpec:
        """Return the training.

        Raises:
            BadRequest: When a field is wrong or missing.
        """
        from gpu_flows.training.spec import TrainingSpec

        if "entrypoint" not in self.training:
            raise BadRequest("nothing to run", hint="name a file: gpu-flows launch train.py --owner NAME")
        return TrainingSpec(**self.training)

    def rental(self, settings: Settings) -> Rental:
        """Return the parameters of renting, checked.

        Raises:
            BadRequest: When one is wrong, or no GPU was asked for.
        """
        from gpu_flows.runs.rental import rental

        if "gpus" not in self.renting:
            raise BadRequest("no GPU was asked for", hint="--gpus H100:8, or --gpus cpu for this machine")
        shared = {name: self.training[name] for name in _SHARED if name in self.training}
        return rental(settings=settings, **self.renting, **shared)


def _understood(given: Given) -> Given:
    """Return the flags with their texts taken apart."""
    said = dict(given)
    if "rest" in said:
        said["args"] = said.pop("rest")
    if "module" in said:
        if "entrypoint" in said:
            raise BadRequest(f"name a file or a module, not both {said['entrypoint']} and {said['module']}")
        said["entrypoint"] = f"-m {said.pop('module')}"
    if "env" in said:
        said["env"] = dict(map(_variable, said["env"]))
    if "secrets" in said:
        said["secrets"] = {
            name: source or name for name, _, source in (s.partition("=") for s in said["secrets"])
        }
    if "image" in said:
        said["image"] = _image(said["image"])
    return said


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if equals:
        return name, value
    if name not in os.environ:
        raise BadRequest(
            f"--env {name}: there is no such variable here to pass on", hint=f"--env {name}=VALUE"
        )
    return name, os.environ[name]


def _image(texts: Sequence[str]) -> str | dict[str, str]:
    if len(texts) == 1 and "=" not in texts[0]:
        return texts[0]
    if wrong := [text for text in texts if "=" not in text]:
        raise BadRequest(f"--image {wrong[0]}: several images need their clouds", hint="--image CLOUD=IMAGE")
    return dict(text.split("=", 1) for text in texts)


def _read(path: Path, said: Given) -> dict[str, Any]:
    """Return what a file says, all its names checked, its paths taken from where it lies."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadRequest(f"--config {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"--config {path} is not valid TOML: {error}") from error
    training, renting = data.get("training", {}), data.get("rental", {})
    if "training" not in data and "rental" not in data:
        training, data = data, {"training": data}
    if stray := sorted(set(data) - {"training", "rental"}):
        raise BadRequest(f"{path}: {stray[0]!r} stands outside of the tables [training] and [rental]")
    for title, table, names in (
        ("training", training, _TRAINING),
        ("rental", renting, _RENTING | _FOLLOWING),
    ):
        if not isinstance(table, dict):
            raise BadRequest(f"{path}: {title} has to be a table")
        for name in sorted(set(table) - names):
            near = difflib.get_close_matches(name, sorted(names), 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(names))}"
            raise BadRequest(f"{path}: [{title}] has no {name!r}", hint=hint)
    return {**renting, **_beside(path, training, said)}


def _beside(path: Path, training: dict[str, Any], said: Given) -> dict[str, Any]:
    """Return the table with its paths taken from where the file lies."""
    moved = dict(training)
    for name in _PATHS:
        if isinstance(moved.get(name), str):
            moved[name] = path.parent / Path(moved[name]).expanduser()
    if "entrypoint" in training and not {"entrypoint", "code"} & set(said):
        from gpu_flows.training.spec import TrainingSpec

        # The file's own rule for an entrypoint without code: the folder that it lies in.
        whole = TrainingSpec.from_toml(path)
        moved |= {"entrypoint": whole.entrypoint, "code": whole.code}
    return moved
