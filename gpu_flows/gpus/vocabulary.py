"""Every word that may stand for cards of the catalog, spelled out once.

Looking a word up whole in a table, rather than taking it apart, is what keeps a typo from buying another
card: ``A100-8`` is simply not in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NoReturn

from gpu_flows.errors import SettingsError
from gpu_flows.gpus.model import GpuModel, GpuVariant, Kind, Selection
from gpu_flows.gpus.spelling import did_you_mean, key


class Vocabulary:
    """The words for models, families and pools, and the variants that they stand for.

    Args:
        models: The catalog's cards.
        pools: Names of pools with the words for their members.
        source: Where they come from, for messages.

    Raises:
        SettingsError: When a word could mean two things, or a card or pool refers to none.

    Attributes:
        variants: Every variant by the key of its name.
        words: What each word stands for, by its key.
        variants_of: The variants of each model, the one of unknown form factor first.
    """

    def __init__(self, models: Sequence[GpuModel], pools: Mapping[str, Sequence[str]], source: str) -> None:
        self._source = source
        self._canonical: dict[frozenset[str], Selection] = {}
        self.words: dict[str, Selection] = {}
        self.variants: dict[str, GpuVariant] = {}
        self.variants_of = {model.name: tuple(_variants(model)) for model in models}
        for variant in (each for variants in self.variants_of.values() for each in variants):
            if self.variants.setdefault(key(variant.name), variant) is not variant:
                self._refuse(f"{variant.name!r} is the name of two cards")
        for family in dict.fromkeys(model.family for model in models):
            self._spell_family([model for model in models if model.family == family])
        everything = frozenset(variant.name for variant in self.variants.values())
        self._add("ANY", Selection(Kind.POOL, "ANY", everything))
        for name, members in pools.items():
            inside = frozenset[str]().union(*(self._member(name, member) for member in members))
            self._add(name, Selection(Kind.POOL, name, inside))

    def selection(self, called: Iterable[GpuVariant], name: str) -> Selection:
        """Return what somebody else's name for those variants stands for.

        Where the name leaves the form factor open, it stands for all of them.
        """
        names = frozenset(
            meant.name
            for variant in called
            for meant in (self.variants_of[variant.model.name] if variant.form is None else (variant,))
        )
        return self._canonical.get(names) or Selection(Kind.MODEL, name, names)

    def of_form(self, model: GpuModel, form: str | None) -> GpuVariant:
        """Return the variant of a model in that form factor; None for the one that leaves it open."""
        return next(each for each in self.variants_of[model.name] if each.form == form)

    def _spell_family(self, models: list[GpuModel]) -> None:
        variants = [variant for model in models for variant in self.variants_of[model.name]]
        forms: dict[str | None, dict[str, None]] = {None: {"": None}}
        for model in models:
            for name, more in model.forms.items():
                forms.setdefault(name, {}).update(dict.fromkeys((name, *more)))
        sizes = sorted({model.vram_gb for model in models})
        bases = dict.fromkeys([models[0].family, *(alias for model in models for alias in model.aliases)])
        # The first word for a set of variants is its canonical one: the family, then the models' own names,
        # then with memory, with form factor, with both.
        self._spell(models[0].family, variants, variants)
        for model in models:
            if model.name != model.family:
                self._spell(model.name, self.variants_of[model.name], variants)
        for form, size in product(forms, (None, *sizes)):
            chosen = [each for each in variants if form in (None, each.form) and size in (None, each.vram_gb)]
            memory = f"{size}GB" if size else ""
            for base, spelling in product(bases, forms[form]):
                for parts in ((base, memory, spelling), (base, spelling, memory)):
                    self._spell("-".join(filter(None, parts)), chosen, variants)

    def _spell(self, word: str, chosen: Sequence[GpuVariant], family: Sequence[GpuVariant]) -> None:
        names = frozenset(variant.name for variant in chosen)
        if not names:
            return
        if names not in self._canonical:
            forms = {variant.form for variant in chosen}
            told_apart = len({variant.form for variant in family}) > 1
            form = chosen[0].form if told_apart and len(forms) == 1 else None
            models = [variant.model for variant in chosen]
            upgrades = self._also((name for model in models for name in model.upgrades_to), form)
            successors = self._also((model.successor for model in models), form)
            self._canonical[names] = Selection(Kind.MODEL, word, names, upgrades - names, successors - names)
        self._add(word, self._canonical[names])

    def _also(self, models: Iterable[str | None], form: str | None) -> frozenset[str]:
        """Return the variants of those models; a form factor that was asked for holds for them too."""
        found: set[str] = set()
        for name in filter(None, models):
            if name not in self.variants_of:
                self._refuse(f"no card is called {name!r}, which another names as its follower", name)
            found.update(each.name for each in self.variants_of[name] if form in (None, each.form))
        return frozenset(found)

    def _member(self, pool: str, word: str) -> frozenset[str]:
        if key(word) not in self.words:
            self._refuse(f"pools.{pool} names {word!r}, which is no card", word)
        return self.words[key(word)].variants

    def _add(self, word: str, selection: Selection) -> None:
        other = self.words.setdefault(key(word), selection)
        if other is not selection:
            self._refuse(f"{word!r} could mean {other.name} or {selection.name}")

    def _refuse(self, why: str, word: str | None = None) -> NoReturn:
        known = {spelled: each.name for spelled, each in self.words.items()}
        raise SettingsError(
            f"the GPU catalog {self._source}: {why}", hint=did_you_mean(word, known) if word else None
        )


def _variants(model: GpuModel) -> Iterator[GpuVariant]:
    """Yield the model in each form factor, and first the one whose form factor is not known."""
    if len(model.forms) < 2:
        yield GpuVariant(model.name, model, next(iter(model.forms), None))
        return
    yield GpuVariant(model.name, model)
    for form in model.forms:
        yield GpuVariant(f"{model.name}-{form}", model, form)
