"""What the catalog knows of one GPU: plain values, no lookups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """What a word of a request names."""

    MODEL = "model"
    """A card of the catalog, with or without form factor and memory."""
    POOL = "pool"
    """A named set of cards; ANY is every card of the catalog."""
    INSTANCE = "instance"
    """One instance type of one cloud."""
    CPU = "cpu"
    """No GPU at all."""
    RAW = "raw"
    """A name that is handed to the clouds as it is."""


@dataclass(frozen=True, slots=True)
class CloudListing:
    """How one cloud rents a card.

    Attributes:
        ids: The cloud's own names for it, each with the form factor that it stands for (None: not told).
        max_count: Most GPUs on one box, as published; the cloud's live answer decides.
        instances: Instance types that carry it, with their number of GPUs.
    """

    ids: Mapping[str, str | None]
    max_count: int
    instances: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """A card as it can be bought: one memory size, in one or several form factors.

    Attributes:
        name: Canonical name, ``A100-80GB``.
        family: What the sizes of one card have in common, ``A100``.
        label: Name for people.
        vram_gb: Nominal memory per GPU.
        architecture: ``cuda`` or ``rocm``.
        generation: ``turing``, ``ampere``, ``ada``, ``hopper``, ``blackwell``, ``volta``, ``cdna3``.
        compute_capability: CUDA compute capability, ``8.0``; None for ROCm.
        min_cuda: First CUDA release that can drive it, where that matters today.
        forms: Form factors or editions, each with further spellings.
        aliases: Further spellings of the family.
        products: Names by which drivers report it, with the form factor that each one stands for.
        upgrades_to: Models that a cloud may give in its place.
        successor: The model that ``NAME+`` accepts as well.
        notes: Where sources disagree, and what to look out for.
        clouds: How each cloud rents it.
    """

    name: str
    family: str
    label: str
    vram_gb: int
    architecture: str
    generation: str
    compute_capability: str | None = None
    min_cuda: str | None = None
    forms: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    aliases: tuple[str, ...] = ()
    products: Mapping[str, str | None] = field(default_factory=dict, hash=False)
    upgrades_to: tuple[str, ...] = ()
    successor: str | None = None
    notes: str = ""
    clouds: Mapping[str, CloudListing] = field(default_factory=dict, hash=False)

    @property
    def providers(self) -> tuple[str, ...]:
        """Clouds that rent it."""
        return tuple(self.clouds)

    @property
    def form_factors(self) -> tuple[str, ...]:
        """Form factors or editions in which it comes; empty where there is but one."""
        return tuple(self.forms)

    @property
    def ids(self) -> dict[str, tuple[str, ...]]:
        """Each cloud's own names for it."""
        return {cloud: tuple(listing.ids) for cloud, listing in self.clouds.items()}

    @property
    def max_count(self) -> dict[str, int]:
        """Most GPUs on one box, for each cloud."""
        return {cloud: listing.max_count for cloud, listing in self.clouds.items()}

    def to_json(self) -> dict[str, Any]:
        """Return what a program or a page shows of it, as plain JSON values."""
        return {
            "name": self.name,
            "family": self.family,
            "label": self.label,
            "vram_gb": self.vram_gb,
            "architecture": self.architecture,
            "generation": self.generation,
            "compute_capability": self.compute_capability,
            "min_cuda": self.min_cuda,
            "form_factors": list(self.form_factors),
            "providers": list(self.providers),
            "ids": {cloud: list(ids) for cloud, ids in self.ids.items()},
            "max_count": self.max_count,
            "notes": self.notes,
        }


@dataclass(frozen=True, slots=True)
class GpuVariant:
    """One model in one form factor: what an offer promises and what a box turns out to have.

    Attributes:
        name: Canonical name, unique in the catalog: ``A100-80GB-SXM``; ``A100-80GB`` when the form factor is
            not known.
        model: The model.
        form: The form factor; None when it is not known, or the model has none to tell apart.
    """

    name: str
    model: GpuModel = field(repr=False, compare=False)
    form: str | None = None

    @property
    def vram_gb(self) -> int:
        """Nominal memory per GPU."""
        return self.model.vram_gb

    def is_a(self, promised: GpuVariant) -> bool:
        """Tell whether a box that has this card has what was promised.

        A form factor that one side does not know is no contradiction: drivers and clouds leave it out.
        """
        same_form = self.form is None or promised.form is None or self.form == promised.form
        return self.model.name == promised.model.name and same_form


@dataclass(frozen=True, slots=True)
class Selection:
    """The cards that one word of a request stands for.

    Attributes:
        kind: MODEL, POOL or INSTANCE.
        name: Canonical spelling.
        variants: Names of the variants that it means.
        upgrades: Names of variants that a cloud may give in their place, for a price.
        successors: Names of the variants that ``+`` adds.
        cloud: For an instance type, the cloud that has it.
        count: For an instance type, its number of GPUs.
    """

    kind: Kind
    name: str
    variants: frozenset[str]
    upgrades: frozenset[str] = frozenset()
    successors: frozenset[str] = frozenset()
    cloud: str | None = None
    count: int = 1
