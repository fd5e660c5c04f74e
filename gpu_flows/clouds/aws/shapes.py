"""The instance types with GPUs: a data table, and which of them a request is worth asking for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from typing import Any

from gpu_flows.gpus.catalog import Catalog, load_catalog
from gpu_flows.gpus.model import Kind
from gpu_flows.gpus.request import GpuRequest

CLOUD = "aws"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One instance type.

    Attributes:
        type: AWS's name, ``p5.48xlarge``.
        gpu: Catalog name of its GPUs, or AWS's own name for a card that the catalog does not know.
        gpu_count: GPUs on the box; they are rented whole.
        vram_gb: Nominal VRAM per GPU.
        vcpus: By which quotas count; None when it is not known.
        usd_per_hour: List price on demand in us-east-1; None when there is none.
        quotas: Quota codes by market, ``on_demand`` and ``spot``.
        unavailable: Why it is not rented anywhere; None when it is.
    """

    type: str
    gpu: str
    gpu_count: int
    vram_gb: float
    vcpus: int | None = None
    usd_per_hour: float | None = None
    quotas: Mapping[str, str] = field(default_factory=dict)
    unavailable: str | None = None


@dataclass(frozen=True, slots=True)
class ListPrices:
    """The prices that the table itself states.

    Attributes:
        as_of: Month of the table, ``2026-10``.
        gp3_usd_per_gb_month: Dollars per GB and month of disk.
        public_ipv4_usd_per_hour: Dollars per hour of a public address, the same everywhere.
    """

    as_of: str
    gp3_usd_per_gb_month: float
    public_ipv4_usd_per_hour: float


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    import tomllib

    return tomllib.loads(resources.files(__package__).joinpath("shapes.toml").read_text("utf-8"))


def list_prices() -> ListPrices:
    """Return what the table says of prices beside those of the types."""
    table = _table()
    return ListPrices(table["prices_as_of"], table["gp3_usd_per_gb_month"], table["public_ipv4_usd_per_hour"])


def known_shapes(catalog: Catalog | None = None) -> dict[str, Shape]:
    """Return every type that the catalog names for AWS, by name.

    Args:
        catalog: The catalog; None for the installation's. A type that it adds to the table has neither
            quota nor list price.
    """
    catalog = catalog or load_catalog()
    found: dict[str, Shape] = {}
    for model in catalog.list_gpus(CLOUD):
        listing = model.clouds[CLOUD]
        for name, count in listing.instances.items():
            variant = catalog.vocabulary.of_form(model, next(iter(listing.ids.values()), None))
            found[name] = shape(name, gpu=variant.name, gpu_count=count, vram_gb=variant.vram_gb)
    return found


def shape(name: str, *, gpu: str, gpu_count: int, vram_gb: float, vcpus: int | None = None) -> Shape:
    """Return a type with what the table knows of it.

    Args:
        name: AWS's name.
        gpu: Name of its GPUs.
        gpu_count: How many.
        vram_gb: Nominal VRAM of each.
        vcpus: Used where the table does not know them.
    """
    table = _table()
    family_name, _, size_name = name.partition(".")
    family = table["families"].get(family_name, {})
    size = family.get("sizes", {}).get(size_name, {})
    return Shape(
        type=name,
        gpu=gpu,
        gpu_count=gpu_count,
        vram_gb=vram_gb,
        vcpus=size.get("vcpus", vcpus),
        usd_per_hour=size.get("usd"),
        quotas=table["quotas"].get(family.get("quota", ""), {}),
        unavailable=family.get("unavailable"),
    )


def wanted_shapes(request: GpuRequest, catalog: Catalog | None = None) -> list[Shape]:
    """Return the known types that carry a card of the request, whatever their size.

    Matching decides on counts and caps afterwards.
    """
    catalog = catalog or load_catalog()
    variants: set[str] = set()
    types: set[str] = set()
    for asked in request.alternatives:
        match asked.kind:
            case Kind.CPU:
                continue
            case Kind.RAW:
                variants |= {variant.name for variant in catalog.called_by(CLOUD, asked.name)}
                types.add(asked.name.lower())
            case Kind.INSTANCE if asked.cloud == CLOUD:
                types.add(asked.name)
            case Kind.INSTANCE:
                continue
            case _:
                variants |= asked.variants(price_capped=True, catalog=catalog)
    shapes = known_shapes(catalog).values()
    return [each for each in shapes if each.gpu in variants or each.type in types]


def unknown_types(request: GpuRequest, shapes: Iterable[Shape]) -> list[str]:
    """Return the instance types that a request names by ``raw:`` and the table does not hold."""
    known = {each.type for each in shapes}
    named = (each.name.lower() for each in request.alternatives if each.kind is Kind.RAW and "." in each.name)
    return [name for name in named if name not in known]
