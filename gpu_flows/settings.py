"""What holds for a whole installation, read in one place.

Later sources win: the file ``config.toml`` in the configuration folder, the environment (``GPU_FLOWS_*``),
and what a caller passes on (Airflow's configuration, Prefect's settings).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_flows.errors import SettingsError

NAMESPACE = re.compile(r"[a-z0-9]{1,16}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """An installation's settings.

    Attributes:
        namespace: Tells this installation's boxes from those of every other one on the same account; required
            for every cloud but `local`.
        clouds: Default list of clouds, in order.
        enabled_clouds: The only clouds that may be rented from; empty for all.
        max_gpus: Most GPUs that one lease may hold; None for no limit.
        max_usd_per_hour: Most dollars per hour that one lease may cost; None for no limit.
        ssh_key: File of a private key for boxes of accounts whose credentials are temporary, so that no key can
            be derived from them.
        accounts: What a cloud's adapter is opened with, by ``cloud`` or ``cloud@account``; may hold secrets. In
            the file: ``[accounts.aws]``, ``[accounts."runpod@team_a"]``.
        state: Folder of journals, logs and what `local` rents out.
    """

    namespace: str | None = None
    clouds: tuple[str, ...] = ()
    enabled_clouds: tuple[str, ...] = ()
    max_gpus: int | None = None
    max_usd_per_hour: float | None = None
    ssh_key: Path | None = None
    accounts: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict, repr=False)
    state: Path = dataclasses.field(default_factory=lambda: state_folder(os.environ))

    @property
    def journals(self) -> Path:
        """Folder of this machine's journals."""
        return self.state / "journal"

    @property
    def logs(self) -> Path:
        """Folder of the logs and reports of runs."""
        return self.state / "runs"


def config_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of ``config.toml``."""
    if told := environ.get("GPU_FLOWS_CONFIG_HOME"):
        return Path(told)
    return Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "gpu-flows"


def state_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of everything that this machine remembers."""
    if told := environ.get("GPU_FLOWS_HOME"):
        return Path(told)
    return Path(environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "gpu-flows"


def load_settings(environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
    """Read the settings.

    Args:
        environ: The environment; the process's own unless given.
        **overrides: Values of a surrounding system, by field name; None leaves a field alone.

    Returns:
        The settings.

    Raises:
        SettingsError: When the file or a variable cannot be understood, naming it.
    """
    environ = os.environ if environ is None else environ
    path = config_folder(environ) / "config.toml"
    values: dict[str, Any] = {"state": state_folder(environ)}
    for name, value in _read_file(path).items():
        if name not in _FIELDS:
            known = ", ".join(sorted(_FIELDS))
            raise SettingsError(f"{path}: {name!r} is no setting", hint=f"the settings are {known}")
        values[name] = _convert(name, value, str(path))
    for name in _FIELDS - {"accounts"}:
        if (text := environ.get(f"GPU_FLOWS_{name.upper()}")) not in (None, ""):
            values[name] = _convert(name, text, f"GPU_FLOWS_{name.upper()}")
    values.update({name: value for name, value in overrides.items() if value is not None})
    settings = Settings(**values)
    if settings.namespace is not None and not NAMESPACE.fullmatch(settings.namespace):
        raise SettingsError(f"the namespace {settings.namespace!r} is not 1 to 16 characters of a-z and 0-9")
    return settings


def ensure_namespace(environ: Mapping[str, str] | None = None) -> str:
    """Return this user's namespace, making a random one in the configuration folder at the first call.

    For the command line, and for clouds whose boxes cannot leave this machine. Everywhere else a namespace
    is set on purpose, since workers come and go, and another one would not find the boxes again.
    """
    environ = os.environ if environ is None else environ
    settings = load_settings(environ)
    if settings.namespace:
        return settings.namespace
    path = config_folder(environ) / "namespace"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        # Two threads of one process may be at it as well as two processes.
        fresh = path.with_name(f".namespace.{os.getpid()}.{secrets.token_hex(4)}")
        fresh.write_text(secrets.token_hex(5) + "\n")
        # A hard link fails where the name is taken: two first calls at once agree on one namespace.
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)
        fresh.unlink()
    return path.read_text().strip()


_FIELDS = {f.name for f in dataclasses.fields(Settings)} - {"state"}


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise SettingsError(f"the settings file {path} cannot be read: {error}") from error


def _convert(name: str, value: Any, source: str) -> Any:
    try:
        match name:
            case "clouds" | "enabled_clouds":
                items = value.split(",") if isinstance(value, str) else list(value)
                return tuple(str(item).strip() for item in items if str(item).strip())
            case "accounts":
                if not isinstance(value, dict) or not all(
                    isinstance(options, dict) for options in value.values()
                ):
                    raise TypeError("it is a table of tables, such as [accounts.aws]")
                return value
            case "ssh_key":
                return Path(str(value)).expanduser()
            case "max_gpus":
                return int(value)
            case "max_usd_per_hour":
                return float(value)
            case _:
                if not isinstance(value, str):
                    raise TypeError("a text is expected")
                return value.strip()
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{source}: {name} cannot be {value!r}: {error}") from error
