"""Reads catalog files: the one that ships with the package, and one of the user's own laid over it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from gpu_flows.errors import SettingsError
from gpu_flows.gpus.model import CloudListing, GpuModel
from gpu_flows.gpus.spelling import did_you_mean

SHIPPED = Path(__file__).with_name("catalog.toml")

_T = TypeVar("_T")
_TOP = ("gpu", "pools", "clouds")
_GPU = tuple(name for name in GpuModel.__dataclass_fields__ if name != "name")
_LISTING = ("ids", "max_count", "instances")


@dataclass(frozen=True, slots=True)
class CatalogData:
    """What the files say.

    Attributes:
        models: Cards in the order of the file.
        pools: Names of pools with their members, spelled as in a request.
        clouds: Names of clouds with further spellings.
        source: The files, for messages.
    """

    models: tuple[GpuModel, ...]
    pools: Mapping[str, tuple[str, ...]]
    clouds: Mapping[str, tuple[str, ...]]
    source: str


def read_catalog(own: Path | None = None) -> CatalogData:
    """Read the shipped catalog, with a file of the user's own laid over it.

    Tables are merged key by key, anything else is replaced.

    Raises:
        SettingsError: When a file cannot be read or says something that makes no sense; it names the key.
    """
    merged = _parse(SHIPPED)
    if own is not None:
        merged = _laid_over(merged, _parse(own))
    source = str(own or SHIPPED.name)
    top = _Table(merged, source, "")
    top.check_keys(_TOP)
    gpus, pools, clouds = (top.sub(name) for name in _TOP)
    return CatalogData(
        models=tuple(_model(name, gpus.sub(name), tuple(clouds.value)) for name in gpus.value),
        pools={name: pools.texts(name) for name in pools.value},
        clouds={name: clouds.texts(name) for name in clouds.value},
        source=source,
    )


def _parse(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise SettingsError(
            f"the GPU catalog {path} cannot be read: {error.strerror or error}",
            hint="correct GPU_FLOWS_CATALOG, or unset it",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"the GPU catalog {path} is not TOML: {error}") from error


def _laid_over(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in extra.items():
        under = merged.get(name)
        both = isinstance(under, dict) and isinstance(value, dict)
        merged[name] = _laid_over(under, value) if both else value  # type: ignore[arg-type]
    return merged


class _Table:
    """One table of the file, which knows where it stands so that every complaint can say it."""

    def __init__(self, value: Any, source: str, where: str) -> None:
        self.value: dict[str, Any] = value if isinstance(value, dict) else {}
        self._source = source
        self._where = where
        if not isinstance(value, dict):
            self.refuse(None, "must be a table")

    def refuse(self, name: str | None, why: str, hint: str | None = None) -> NoReturn:
        where = ".".join(part for part in (self._where, name) if part) or "the file"
        raise SettingsError(f"the GPU catalog {self._source}: {where} {why}", hint=hint)

    def check_keys(self, known: tuple[str, ...], what: str = "a key of the catalog") -> None:
        for name in self.value:
            if name not in known:
                self.refuse(name, f"is not {what}", did_you_mean(name, known))

    def sub(self, name: str) -> _Table:
        where = f"{self._where}.{name}" if self._where else name
        return _Table(self.value.get(name, {}), self._source, where)

    def text(self, name: str) -> str | None:
        value = self.value.get(name)
        if value is not None and not (isinstance(value, str) and value.strip()):
            self.refuse(name, "must be a text that is not empty")
        return value

    def number(self, name: str) -> int | None:
        value = self.value.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            self.refuse(name, "must be a whole number of at least 1")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.value.get(name, [])
        if not isinstance(value, list) or not all(isinstance(each, str) and each.strip() for each in value):
            self.refuse(name, "must be a list of texts")
        return tuple(value)

    def required(self, name: str, read: Callable[[str], _T | None]) -> _T:
        value = read(name)
        if value is None:
            self.refuse(name, "is missing")
        return value

    def names_of_forms(self, name: str, forms: Mapping[str, tuple[str, ...]]) -> dict[str, str | None]:
        """Read a list of names, or a table that gives the form factor of each."""
        only = next(iter(forms)) if len(forms) == 1 else None
        if isinstance(self.value.get(name), dict):
            table = self.sub(name)
            for each, form in table.value.items():
                if form not in forms:
                    hint = f"its forms are {', '.join(forms)}" if forms else "it has no forms"
                    table.refuse(each, f"names no form factor of the card: {form!r}", hint)
            return dict(table.value)
        return dict.fromkeys(self.texts(name), only)


def _model(name: str, table: _Table, known_clouds: tuple[str, ...]) -> GpuModel:
    table.check_keys(_GPU)
    forms_table = table.sub("forms")
    forms = {form: forms_table.texts(form) for form in forms_table.value}
    architecture = table.required("architecture", table.text)
    if architecture not in ("cuda", "rocm"):
        table.refuse("architecture", f"must be cuda or rocm, not {architecture!r}")
    clouds = table.sub("clouds")
    clouds.check_keys(known_clouds, "a cloud that [clouds] names")
    return GpuModel(
        name=name,
        family=table.text("family") or name,
        label=table.required("label", table.text),
        vram_gb=table.required("vram_gb", table.number),
        architecture=architecture,
        generation=table.required("generation", table.text),
        compute_capability=table.text("compute_capability"),
        min_cuda=table.text("min_cuda"),
        forms=forms,
        aliases=table.texts("aliases"),
        products=table.names_of_forms("products", forms),
        upgrades_to=table.texts("upgrades_to"),
        successor=table.text("successor"),
        notes=table.text("notes") or "",
        clouds={cloud: _listing(clouds.sub(cloud), forms) for cloud in clouds.value},
    )


def _listing(table: _Table, forms: Mapping[str, tuple[str, ...]]) -> CloudListing:
    table.check_keys(_LISTING)
    counts = table.sub("instances")
    instances = {name: counts.required(name, counts.number) for name in counts.value}
    most = table.number("max_count") or max(instances.values(), default=None)
    if most is None:
        table.refuse("max_count", "is missing", "give it, or the instances with their number of GPUs")
    return CloudListing(ids=table.names_of_forms("ids", forms), max_count=most, instances=instances)
