"""What is asked for: ``"H100:8"``, ``["H100!:8", "A100-80GB:8"]``, pools, ``"cpu:2"``  ->  `GpuRequest`.

The grammar of one alternative is ``NAME[!|+][:COUNT]``, ``cpu[:COUNT]`` or ``raw:NAME[:COUNT]``; commas
separate alternatives in order of preference. A name is looked up whole, never searched for: a typo is an
error, it never buys another card.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from gpu_flows.errors import BadRequest
from gpu_flows.gpus.catalog import Catalog, load_catalog
from gpu_flows.gpus.model import GpuVariant, Kind
from gpu_flows.gpus.spelling import key

MAX_COUNT = 9999
"""No box has more GPUs; more digits are a slip of the finger."""

_COUNT = re.compile(r"[0-9]{1,4}")
_RAW = re.compile(r"raw\s*:", re.IGNORECASE)
_MARKS = re.compile(r"[\s!+]*$")
_LONGEST_NAME = 100


@dataclass(frozen=True, slots=True)
class GpuAlternative:
    """One way to meet a request: some card, and how many of it on one box.

    Attributes:
        name: Canonical spelling without count and marks; for ``raw:NAME`` the name as it was written.
        count: GPUs on one box; processor cores for ``cpu``.
        kind: What the name names.
        exact: ``!`` was given: no upgrade, even under a price cap.
        at_least: ``+`` was given: the card's named successor will do as well.
        cloud: For an instance type, the cloud that has it.
    """

    name: str
    count: int = 1
    kind: Kind = Kind.MODEL
    exact: bool = False
    at_least: bool = False
    cloud: str | None = None

    def __str__(self) -> str:
        prefix = "raw:" if self.kind is Kind.RAW else ""
        mark = "!" if self.exact else "+" if self.at_least else ""
        # An instance type without a count means all of its GPUs, so one of them has to be said.
        count = f":{self.count}" if self.count != 1 or self.kind is Kind.INSTANCE else ""
        return f"{prefix}{self.name}{mark}{count}"

    @property
    def is_cpu(self) -> bool:
        """Whether it asks for a box without a GPU."""
        return self.kind is Kind.CPU

    def variants(self, *, price_capped: bool = False, catalog: Catalog | None = None) -> frozenset[str]:
        """Return the names of the catalog's variants that satisfy it; none for ``cpu`` and ``raw:``.

        Args:
            price_capped: Whether a price cap holds: only then is an upgrade as good.
            catalog: The catalog; None for the installation's.

        Raises:
            BadRequest: When the catalog does not know the name (another one did, where it was parsed).
        """
        if self.kind in (Kind.CPU, Kind.RAW):
            return frozenset()
        catalog = catalog or load_catalog()
        selection = catalog.resolve(self.name)
        if selection is None:
            catalog.refuse_name(self.name)
        found = selection.variants
        if self.at_least:
            found |= selection.successors
        if price_capped and not self.exact:
            found |= selection.upgrades
        return found

    def accepts(
        self,
        gpu: GpuVariant | str | None,
        *,
        price_capped: bool = False,
        catalog: Catalog | None = None,
    ) -> bool:
        """Tell whether a box with that card satisfies it; counts, prices and regions are not looked at.

        Args:
            gpu: A variant of the catalog, its name, another name of a cloud, or None for a box without GPU.
            price_capped: Whether a price cap holds: only then is an upgrade as good.
            catalog: The catalog; None for the installation's.
        """
        if gpu is None or self.is_cpu:
            return gpu is None and self.is_cpu
        name = gpu if isinstance(gpu, str) else gpu.name
        if self.kind is Kind.RAW:
            return key(name) == key(self.name)
        catalog = catalog or load_catalog()
        variant = catalog.variant(name)
        return variant is not None and variant.name in self.variants(
            price_capped=price_capped, catalog=catalog
        )


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """Alternatives in order of preference; `str` gives a text that parses to the same request.

    Attributes:
        alternatives: At least one.
    """

    alternatives: tuple[GpuAlternative, ...]

    def __post_init__(self) -> None:
        if not self.alternatives:
            raise BadRequest("no GPU was asked for", hint="write one such as H100:8, or cpu")

    def __str__(self) -> str:
        return ", ".join(str(alternative) for alternative in self.alternatives)

    @property
    def is_cpu(self) -> bool:
        """Whether every alternative is a box without a GPU."""
        return all(alternative.is_cpu for alternative in self.alternatives)

    def ids_for(
        self, cloud: str, *, price_capped: bool = True, catalog: Catalog | None = None
    ) -> tuple[str, ...]:
        """Return the ids of a cloud that are worth asking it for; `raw:` names are the cloud's to transform.

        Args:
            cloud: Canonical name of the cloud.
            price_capped: Whether upgrades are wanted; asking for too much is put right by matching.
            catalog: The catalog; None for the installation's.
        """
        catalog = catalog or load_catalog()
        wanted: set[str] = set()
        for alternative in self.alternatives:
            if alternative.cloud in (None, cloud):
                wanted |= alternative.variants(price_capped=price_capped, catalog=catalog)
        return catalog.ids_for(cloud, wanted)

    def to_json(self) -> list[str]:
        """Return the alternatives as texts."""
        return [str(alternative) for alternative in self.alternatives]

    @classmethod
    def from_json(cls, data: Sequence[str]) -> GpuRequest:
        """Rebuild a request from what `to_json` returned."""
        return cls.parse(data)

    @classmethod
    def parse(cls, asked: Asked, *, catalog: Catalog | None = None) -> GpuRequest:
        """Understand a request.

        Args:
            asked: A text, a `GpuGroup` or `GpuType` (RunPod's own too), a request, or a list of these.
            catalog: The catalog; None for the installation's.

        Raises:
            BadRequest: A ValueError that names the part that is wrong, and what may have been meant.
        """
        if isinstance(asked, GpuRequest):
            return asked
        items: Iterable[object] = asked if isinstance(asked, list | tuple) else (asked,)
        catalog = catalog or load_catalog()
        found = (alternative for item in items for alternative in _alternatives(item, catalog))
        return cls(tuple(dict.fromkeys(found)))


Asked: TypeAlias = (
    str | Enum | GpuAlternative | GpuRequest | Sequence[str | Enum | GpuAlternative | GpuRequest]
)
"""Everything that `GpuRequest.parse` understands."""


def _alternatives(item: object, catalog: Catalog) -> Iterator[GpuAlternative]:
    if isinstance(item, Enum):  # RunPod's own enums are no strings
        item = item.value
    if isinstance(item, GpuRequest):
        yield from item.alternatives
    elif isinstance(item, GpuAlternative):
        yield item
    elif isinstance(item, str):
        for text in item.split(","):
            yield _alternative(text.strip(), catalog)
    else:
        raise BadRequest(
            f"a GPU request is a text or a list of texts, not {type(item).__name__}",
            hint='write one such as "H100:8" or ["H100:8", "A100-80GB:8"]',
        )


def _alternative(text: str, catalog: Catalog) -> GpuAlternative:
    try:
        raw = _RAW.match(text)
        return _raw(text[raw.end() :]) if raw else _named(text, catalog)
    except BadRequest as error:
        shown = text if len(text) <= _LONGEST_NAME else f"{text[:_LONGEST_NAME]}..."
        raise BadRequest(f"GPU request {shown!r}: {error.message}", hint=error.hint) from None


def _raw(text: str) -> GpuAlternative:
    name, count = _name_and_count(text)
    if not name.isprintable():
        raise BadRequest("a name of a GPU has no control characters")
    return GpuAlternative(name, _count(count, 1), Kind.RAW)


def _named(text: str, catalog: Catalog) -> GpuAlternative:
    marked, count = _name_and_count(text)
    name = _MARKS.sub("", marked)
    marks = set(marked[len(name) :]) & {"!", "+"}
    if key(name) == Kind.CPU:
        kind, canonical, cloud, most = Kind.CPU, "cpu", None, 1
    else:
        selection = catalog.resolve(name)
        if selection is None:
            catalog.refuse_name(name)
        kind, canonical, cloud, most = selection.kind, selection.name, selection.cloud, selection.count
        if "+" in marks and kind is Kind.MODEL and not selection.successors:
            raise BadRequest(f"'+' adds the named successor of a card, and {canonical} has none")
    if marks and kind is not Kind.MODEL:
        raise BadRequest(f"'{marks.pop()}' belongs to one card, and {canonical} is none")
    if len(marks) > 1:
        raise BadRequest("'!' (exactly this card) and '+' (or its successor) contradict each other")
    asked = _count(count, most)
    if kind is Kind.INSTANCE and asked > most:
        raise BadRequest(f"{canonical} has {most} GPUs, not {asked}")
    return GpuAlternative(canonical, asked, kind, "!" in marks, "+" in marks, cloud)


def _name_and_count(text: str) -> tuple[str, str | None]:
    name, colon, count = text.partition(":")
    if not name.strip():
        raise BadRequest("the name of the GPU is missing", hint="write one such as H100:8, or cpu")
    if len(name) > _LONGEST_NAME:
        raise BadRequest("no GPU has so long a name")
    if ":" in count:
        raise BadRequest(f"{count!r} is more than one count", hint="write NAME:COUNT, such as H100:8")
    return name.strip(), count.strip() if colon else None


def _count(text: str | None, default: int) -> int:
    if text is None:
        return default
    if not _COUNT.fullmatch(text) or int(text) < 1:
        raise BadRequest(f"the count {text!r} is no whole number from 1 to {MAX_COUNT}")
    return int(text)
