"""Is this the box that was promised? Asked of the box itself, in one call, before anything is uploaded."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gpu_flows.clouds.base import Box
from gpu_flows.clouds.errors import BoxCheckFailed
from gpu_flows.offers import Offer
from gpu_flows.training.shipped import shipped

OLDEST_PYTHON = (3, 9)
"""What the files that are shipped to a box run on."""

_MIB = 1024 * 1024


class Shell(Protocol):
    """Runs scripts on a box; a `gpu_flows.remote.ssh.RemoteBox`."""

    async def script(self, text: str, *args: str, timeout_s: float) -> bytes:
        """Run POSIX sh text and return what it wrote."""
        ...


@dataclass(frozen=True, slots=True)
class GpuFact:
    """One GPU as its driver reports it.

    Attributes:
        name: Product name.
        vram_mib: Memory that it reports, less than the nominal size; None when it does not say.
    """

    name: str
    vram_mib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxFacts:
    """What a box says about itself.

    Attributes:
        cores: CPU cores that a process may use.
        memory_gb: RAM in GB (2^30 bytes).
        disk_free_gb: Free disk in the login's home, in GB (2^30 bytes).
        python: Version of the Python that would train; None without one.
        torch: Version of its torch; None without one, which a setup may change.
        gpus: Its GPUs.
        driver: Version of the NVIDIA driver.
        gpu_trouble: What a tool says that cannot talk to its GPUs.
    """

    cores: int = 0
    memory_gb: float = 0.0
    disk_free_gb: float = 0.0
    python: str | None = None
    torch: str | None = None
    gpus: Sequence[GpuFact] = ()
    driver: str | None = None
    gpu_trouble: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the facts as plain JSON values."""
        return {
            "cores": self.cores,
            "memory_gb": round(self.memory_gb, 1),
            "disk_free_gb": round(self.disk_free_gb, 1),
            "python": self.python,
            "torch": self.torch,
            "gpus": [{"name": gpu.name, "vram_mib": gpu.vram_mib} for gpu in self.gpus],
            "driver": self.driver,
        }


async def check_box(remote: Shell, box: Box, offer: Offer | None, *, timeout_s: float) -> BoxFacts:
    """Compare a box with what was promised.

    Args:
        remote: The connection to it.
        box: What its cloud says of it.
        offer: What was promised; None for a box that an earlier attempt rented, where the cloud's word counts.
        timeout_s: For the whole check.

    Returns:
        What it says about itself.

    Raises:
        BoxCheckFailed: Naming everything that differs.
        SshError: When it cannot be asked.
    """
    script = f"{shipped('interpreter.sh')}\n{shipped('facts.sh')}"
    facts = parse_facts((await remote.script(script, timeout_s=timeout_s)).decode("utf-8", "replace"))
    if problems := differences(facts, box, offer):
        raise BoxCheckFailed(f"box {box.id} is not what was promised: {'; '.join(problems)}")
    return facts


def parse_facts(text: str) -> BoxFacts:
    """Read the reply of ``facts.sh``."""
    said: dict[str, list[str]] = {}
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        said.setdefault(word, []).append(rest.strip())
    nvidia = list(csv.reader(said.get("nvidia", ()), skipinitialspace=True))
    gpus = [GpuFact(row[0], _number(row[1])) for row in nvidia if len(row) == 3]
    return BoxFacts(
        cores=_number(_first(said, "cores")) or 0,
        memory_gb=(_number(_first(said, "memory_kb")) or 0) / _MIB,
        disk_free_gb=(_number(_first(said, "disk_free_kb")) or 0) / _MIB,
        python=_first(said, "python") or None,
        torch=_first(said, "torch") or None,
        gpus=tuple(gpus or _rocm(said.get("rocm", ()))),
        driver=nvidia[0][2] if gpus else None,
        gpu_trouble=_first(said, "nvidia-failed") or _first(said, "rocm-failed"),
    )


def differences(facts: BoxFacts, box: Box, offer: Offer | None) -> list[str]:
    """Return what is not as promised, a phrase each."""
    promised, count = (offer.gpu, offer.gpu_count) if offer is not None else (box.gpu, box.gpu_count)
    problems = []
    if promised is not None:
        problems += _gpu_differences(facts, promised, count, offer.vram_gb if offer is not None else 0)
    elif offer is not None and offer.vcpus is not None and facts.cores < offer.vcpus:
        problems.append(f"it has {facts.cores} CPU cores, not {offer.vcpus}")
    wanted = ".".join(map(str, OLDEST_PYTHON))
    if facts.python is None:
        problems.append(f"it has no Python; {wanted} or newer is needed")
    elif tuple(int(part) for part in facts.python.split(".")[:2]) < OLDEST_PYTHON:
        problems.append(f"its Python is {facts.python}; {wanted} or newer is needed")
    return problems


def _gpu_differences(facts: BoxFacts, promised: str, count: int, vram_gb: float) -> list[str]:
    if not facts.gpus:
        trouble = f" ({facts.gpu_trouble})" if facts.gpu_trouble else ""
        return [f"it shows no GPU{trouble}, not {count} x {promised}"]
    problems = []
    if len(facts.gpus) < count:
        problems.append(f"it has {len(facts.gpus)} GPUs, not {count}")
    others = Counter(_described(gpu) for gpu in facts.gpus if not _is(gpu, promised, vram_gb))
    problems += [f"{number} x {what} instead of {promised}" for what, number in others.items()]
    return problems


def _is(gpu: GpuFact, promised: str, vram_gb: float) -> bool:
    """Tell whether a GPU is the promised one: by the catalog, or for one that it does not know by its memory."""
    from gpu_flows.gpus.catalog import KNOWN_CARD_SHARE, load_catalog

    catalog = load_catalog()
    variant = catalog.variant(promised)
    if variant is None:
        return gpu.vram_mib is None or gpu.vram_mib >= KNOWN_CARD_SHARE * vram_gb * 1024
    found = catalog.from_product_name(gpu.name, gpu.vram_mib)
    return found is not None and found.is_a(variant)


def _described(gpu: GpuFact) -> str:
    return gpu.name if gpu.vram_mib is None else f"{gpu.name} with {gpu.vram_mib / 1024:.0f} GB"


def _rocm(lines: Iterable[str]) -> list[GpuFact]:
    """Read rocm-smi's table, whose columns differ from release to release, warnings before it included."""
    rows = [row for row in csv.reader(lines) if row]
    start = next((number for number, row in enumerate(rows) if row[0] == "device"), None)
    if start is None:
        return []
    columns = {name.strip().lower(): position for position, name in enumerate(rows[start])}
    gpus = []
    for row in rows[start + 1 :]:
        if len(row) != len(rows[start]) or not row[0].startswith("card"):
            continue
        # Releases disagree on which of the columns holds the name and which a hexadecimal id.
        names = [
            row[columns[name]] for name in ("card series", "card model", "device name") if name in columns
        ]
        name = next(
            (name for name in names if name and not name.startswith("0x") and name != "N/A"), "AMD GPU"
        )
        memory = columns.get("vram total memory (b)")
        size = _number(row[memory]) if memory is not None else None
        gpus.append(GpuFact(name, None if size is None else size // _MIB))
    return gpus


def _first(said: dict[str, list[str]], word: str) -> str:
    return said.get(word, [""])[0]


def _number(text: str) -> int | None:
    """Return a number, or None for ``[N/A]`` and the like."""
    return int(text) if text.strip().isdigit() else None
