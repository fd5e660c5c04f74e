"""The curated catalog of GPUs: what exists, what it is called where, and how much memory it has.

The data is ``catalog.toml``; a file of the user's own (argument, or the setting ``GPU_FLOWS_CATALOG``)
extends or overrides it. Nothing is read before the first question.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

from gpu_flows.errors import BadRequest
from gpu_flows.gpus.model import GpuModel, GpuVariant, Kind, Selection
from gpu_flows.gpus.spelling import did_you_mean, either, key
from gpu_flows.gpus.vocabulary import Vocabulary

CATALOG_SETTING = "GPU_FLOWS_CATALOG"

# What is reported is usable memory, never nominal: 0.93 is the least share seen (L4 and A10G on AWS, 22888
# MiB of 24 GiB). A card that the catalog knows is held against its nominal size, with a little slack more
# for reserved memory (a T4 with ECC: 15109 MiB, 0.922); less than that is a slice of the card, not the card.
REPORTED_SHARE = 0.93
KNOWN_CARD_SHARE = 0.9

_VENDOR = re.compile(r"^(?:(?:nvidia|amd|tesla|geforce|instinct)[\s_-]+)+", re.IGNORECASE)


class Catalog:
    """Every lookup, prepared once, over the cards of the catalog files.

    Args:
        own: A file that extends or overrides the shipped catalog.

    Attributes:
        models: The cards, in the order of the file.
        clouds: The clouds that the catalog names.
        vocabulary: Every word that a request may use for cards.

    Raises:
        SettingsError: When the file cannot be read or makes no sense.
    """

    def __init__(self, own: Path | None = None) -> None:
        # tomllib costs a few milliseconds, which `import gpu_flows` must not pay.
        from gpu_flows.gpus.catalog_file import read_catalog

        data = read_catalog(own)
        self.models = data.models
        self.clouds = tuple(data.clouds)
        self._cloud_names = {key(each): name for name, more in data.clouds.items() for each in (name, *more)}
        self._model_by_name = {model.name: model for model in data.models}
        self.vocabulary = Vocabulary(data.models, data.pools, data.source)
        self._by_cloud_id = {cloud: self._ids_of(cloud) for cloud in self.clouds}
        self._instances = dict(self._instance_types())
        self._products = {
            _product_key(name): self.vocabulary.of_form(model, form)
            for model in data.models
            for name, form in model.products.items()
        }

    def list_gpus(self, provider: str | None = None) -> list[GpuModel]:
        """Return the cards in the catalog's order, or those that one cloud rents.

        Raises:
            BadRequest: When there is no such cloud.
        """
        if provider is None:
            return list(self.models)
        cloud = self.canonical_cloud(provider)
        return [model for model in self.models if cloud in model.clouds]

    def find(self, name: str) -> GpuModel:
        """Return the card of that name; of a family (``A100``) the one with most memory.

        Args:
            name: Any spelling that a request may use for one card, or a cloud's own id.

        Raises:
            BadRequest: When there is no such card; it suggests what may have been meant.
        """
        selection = self.resolve(name)
        if selection is None:
            self.refuse_name(name)
        if selection.kind is not Kind.MODEL:
            what = "a pool" if selection.kind is Kind.POOL else "an instance type"
            raise BadRequest(f"{name!r} is {what}, not a card")
        if selection.name in self._model_by_name:
            return self._model_by_name[selection.name]
        return max(self._models(selection), key=lambda model: (model.vram_gb, model.name))

    def vram_for(self, name: str) -> int:
        """Return the nominal memory of the card that `find` returns, in GB."""
        return self.find(name).vram_gb

    def variant(self, name: str) -> GpuVariant | None:
        """Return the variant of that canonical name, as an offer carries it; None when there is none."""
        return self.vocabulary.variants.get(key(name))

    def canonical_cloud(self, name: str) -> str:
        """Return the canonical name of a cloud: ``vast`` is ``vastai``.

        Raises:
            BadRequest: When there is no such cloud.
        """
        cloud = self._cloud_names.get(key(name))
        if cloud is None:
            hint = did_you_mean(name, self._cloud_names) or f"the catalog knows {', '.join(self.clouds)}"
            raise BadRequest(f"there is no cloud called {name!r}", hint=hint)
        return cloud

    def resolve(self, name: str) -> Selection | None:
        """Return what a word of a request stands for; None when nothing is called that.

        The catalog's own spellings win; then an exact id or instance type of a cloud; then the name by which
        a driver reports a card.
        """
        spelled = key(name)
        found = self.vocabulary.words.get(spelled)
        if found:
            return found
        called = [each for ids in self._by_cloud_id.values() for each in ids.get(spelled, ())]
        if called:
            return self.vocabulary.selection(called, name)
        if spelled in self._instances:
            return self._instances[spelled]
        bare = _product_key(name)
        if bare in self._products:
            return self.vocabulary.selection([self._products[bare]], name)
        found = self.vocabulary.words.get(bare)
        return found if found and found.kind is Kind.MODEL else None

    def from_cloud_id(self, cloud: str, id: str, vram_mib: float | None = None) -> GpuVariant | None:  # noqa: A002
        """Return the card that a cloud calls by that id.

        Args:
            cloud: The cloud.
            id: The cloud's own id, compared whole: a MIG slice or an ``RTX 4090D`` is another card.
            vram_mib: Memory per GPU that the cloud reports. It decides where one id stands for several sizes
                (Vast.ai's ``A100 SXM4``), and a card with too little of it is not that card.

        Returns:
            The variant, or None when the catalog knows none, or the memory leaves it open or contradicts it.
        """
        candidates = self.called_by(cloud, id)
        return _by_memory(candidates, vram_mib) if candidates else self.from_product_name(id, vram_mib)

    def called_by(self, cloud: str, id: str) -> tuple[GpuVariant, ...]:  # noqa: A002
        """Return the variants that a cloud calls by that id; none where the catalog does not know it."""
        return self._by_cloud_id.get(self._cloud_names.get(key(cloud), cloud), {}).get(key(id), ())

    def from_product_name(self, name: str, vram_mib: float | None = None) -> GpuVariant | None:
        """Return the card that ``nvidia-smi`` or ``rocm-smi`` reports by that name.

        Args:
            name: The product name: ``NVIDIA A100-SXM4-80GB``, ``AMD Instinct MI300X OAM``.
            vram_mib: Memory per GPU that it reports; it decides where the name leaves the size open.
        """
        bare = _product_key(name)
        if bare in self._products:
            return _by_memory((self._products[bare],), vram_mib)
        selection = self.vocabulary.words.get(bare)
        if selection is None or selection.kind is not Kind.MODEL:
            return None
        variants = [self.vocabulary.variants[key(each)] for each in selection.variants]
        # "A100" alone leaves the form factor open too: then the variant that does not name one is meant.
        formless = [variant for variant in variants if variant.name == variant.model.name]
        return _by_memory(formless or variants, vram_mib)

    def ids_for(self, cloud: str, variants: Iterable[str]) -> tuple[str, ...]:
        """Return the ids under which a cloud rents any of those variants, in the catalog's order."""
        wanted = frozenset(variants)
        return tuple(
            dict.fromkeys(
                name
                for model in self.models
                for name, form in (model.clouds[cloud].ids if cloud in model.clouds else {}).items()
                if self.vocabulary.of_form(model, form).name in wanted
            )
        )

    def refuse_name(self, name: str) -> NoReturn:
        """Raise the error for a name that nothing carries.

        Raises:
            BadRequest: Always, with what may have been meant.
        """
        size = re.search(r"[\s_-]*(\d+)\s*GB\b", name, re.IGNORECASE)
        rest = self.resolve(name.replace(size[0], "")) if size else None
        if size and rest and rest.kind is Kind.MODEL:
            sizes = sorted({model.vram_gb for model in self._models(rest)})
            raise BadRequest(f"{rest.name} has {either(f'{each} GB' for each in sizes)}, not {size[1]} GB")
        known = {"cpu": "cpu"} | {spelled: found.name for spelled, found in self.vocabulary.words.items()}
        hint = did_you_mean(name, known) or "`gpu-flows gpus` lists them; raw:NAME hands a name to the clouds"
        raise BadRequest(f"no GPU is called {name!r}", hint=hint)

    def _models(self, selection: Selection) -> list[GpuModel]:
        return [self.vocabulary.variants[key(name)].model for name in selection.variants]

    def _ids_of(self, cloud: str) -> dict[str, tuple[GpuVariant, ...]]:
        ids: dict[str, tuple[GpuVariant, ...]] = {}
        for model in self.list_gpus(cloud):
            for name, form in model.clouds[cloud].ids.items():
                ids[key(name)] = (*ids.get(key(name), ()), self.vocabulary.of_form(model, form))
        return ids

    def _instance_types(self) -> Iterator[tuple[str, Selection]]:
        for model in self.models:
            for cloud, listing in model.clouds.items():
                forms = [self.vocabulary.of_form(model, form) for form in listing.ids.values()]
                variants = self.vocabulary.selection(forms, model.name).variants
                for name, count in listing.instances.items():
                    yield key(name), Selection(Kind.INSTANCE, name, variants, cloud=cloud, count=count)


def _by_memory(candidates: Iterable[GpuVariant], vram_mib: float | None) -> GpuVariant | None:
    """Return the largest card that the reported memory allows; None when it is not reported and decides."""
    found = sorted(candidates, key=lambda variant: (variant.vram_gb, variant.name))
    if vram_mib is not None:
        found = [each for each in found if vram_mib >= KNOWN_CARD_SHARE * each.vram_gb * 1024][-1:]
    return found[0] if len(found) == 1 else None


def _product_key(name: str) -> str:
    return key(_VENDOR.sub("", name.strip()))


@lru_cache(maxsize=8)
def _loaded(own: str) -> Catalog:
    return Catalog(Path(own).expanduser() if own else None)


def load_catalog(own: str | Path | None = None) -> Catalog:
    """Return the catalog, read once for each file.

    Args:
        own: A TOML file that extends or overrides the shipped catalog; None for the one that the setting
            ``GPU_FLOWS_CATALOG`` names, if any.

    Raises:
        SettingsError: When the file cannot be read or makes no sense.
    """
    return _loaded(str(own or os.environ.get(CATALOG_SETTING) or ""))


def list_gpus(provider: str | None = None) -> list[GpuModel]:
    """Return the cards of the catalog, or those that one cloud rents; none for ``local``.

    Raises:
        BadRequest: When there is no such cloud.
    """
    return load_catalog().list_gpus(provider)


def find(name: str) -> GpuModel:
    """Return the card of that name: ``find("rtx4090").vram_gb == 24``; of a family the largest.

    Raises:
        BadRequest: When there is no such card; it suggests what may have been meant.
    """
    return load_catalog().find(name)


def vram_for(name: str) -> int:
    """Return a card's nominal memory in GB: ``vram_for("A100") == 80``.

    Raises:
        BadRequest: When there is no such card.
    """
    return load_catalog().vram_for(name)


def from_cloud_id(cloud: str, id: str, vram_mib: float | None = None) -> GpuVariant | None:  # noqa: A002
    """Return the card that a cloud calls by that id; see `Catalog.from_cloud_id`."""
    return load_catalog().from_cloud_id(cloud, id, vram_mib)


def from_product_name(name: str, vram_mib: float | None = None) -> GpuVariant | None:
    """Return the card that a driver reports by that name; see `Catalog.from_product_name`."""
    return load_catalog().from_product_name(name, vram_mib)


def nominal_vram_gb(variant: GpuVariant | None, vram_mib: float) -> float:
    """Return the memory that an offer states: nominal for a known card, else what was reported, in GB.

    Filters compare what is merely reported with `REPORTED_SHARE` of what was asked for.
    """
    return variant.vram_gb if variant else round(vram_mib / 1024, 2)
