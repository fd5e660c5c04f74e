"""``gpus`` and ``resolve``: what can be asked for, and what the clouds offer now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_flows.cli.exits import Exit
from gpu_flows.cli.flags import CONDITIONS, CONFIG, GPUS, WHERE
from gpu_flows.cli.output import Cell, Column, Output, usd
from gpu_flows.cli.verbs import Flag, Given, verb

if TYPE_CHECKING:
    from gpu_flows.offers import Offer


@verb([Flag("provider", str, "Only what this cloud rents.", metavar="CLOUD")])
def gpus(given: Given, output: Output) -> int:
    """List the GPUs that can be asked for, with their memory and the clouds that rent them."""
    from gpu_flows.gpus.catalog import list_gpus

    models = list_gpus(given.get("provider"))
    output.table(
        {"gpus": [model.to_json() for model in models]},
        [
            Column("GPU"),
            Column("GB", right=True),
            Column("generation"),
            Column("forms", whole=False),
            Column("clouds", whole=False),
        ],
        [
            (
                model.name,
                f"{model.vram_gb}",
                f"{model.architecture} {model.generation}",
                " ".join(model.form_factors),
                " ".join(sorted(model.providers)),
            )
            for model in models
        ],
    )
    if not models:
        output.say(f"{given['provider']} rents no GPUs; ask it for cpu")
    return Exit.OK


@verb(
    [
        Flag(
            "request",
            list[str],
            "What is asked for; without it, everything.",
            metavar="REQUEST",
            positional=True,
        ),
        GPUS,
        *WHERE,
        *CONDITIONS,
        CONFIG,
    ]
)
def resolve(given: Given, output: Output) -> int:
    """Show what the clouds offer now, in the order in which it would be tried.

    Without a request: all that they sell, cheapest first. It spends nothing.
    """
    from gpu_flows.cli.asked import Asked
    from gpu_flows.cli.session import installation

    requests = [*given.pop("request", []), *given.pop("gpus", [])]
    if requests:
        given["gpus"] = requests
    with installation(output) as here:
        asked = Asked.of(given)
        if "gpus" not in asked.renting:
            asked.renting["gpus"] = ["ANY", "cpu"]
            asked.renting.setdefault("strategy", "cheapest")
            if "provider" not in asked.renting:
                asked.renting.setdefault("clouds", here.configured_clouds())
        from gpu_flows.runs.resolve import resolve as ask

        wanted = asked.rental(here.settings)
        output.screen.waiting(f"asking {', '.join(wanted.clouds)}")
        found = ask(wanted, here)
    output.table(
        found.to_json(),
        [
            Column("cloud"),
            Column("region", whole=False),
            Column("type", whole=False),
            Column("GPUs", whole=False),
            Column("GB", right=True),
            Column("$/h", right=True),
            Column("", whole=False),
        ],
        [_row(offer) for offer in found.offers],
    )
    for ref, reason in found.silent.items():
        output.say(f"{ref} gave no offers: {reason}")
    if found.available:
        return Exit.OK
    output.failed("CAPACITY_UNAVAILABLE", found.why_nothing())
    return Exit.NOTHING_RENTED


def _row(offer: Offer) -> tuple[str | Cell, ...]:
    ref = offer.ref
    gpus = f"{offer.gpu_count} x {offer.gpu}" if offer.gpu else f"{offer.vcpus or '?'} cores"
    if offer.gpu and offer.used_count and offer.used_count != offer.gpu_count:
        gpus += f" ({offer.used_count} used)"
    remarks = [
        "spot" if offer.spot else "",
        f"{offer.stock} in stock" if offer.stock else offer.stock_level,
        f"at least {offer.minimum_minutes} min" if offer.minimum_minutes else "",
        offer.price_note,
    ]
    note = Cell(offer.unavailable, "red") if offer.unavailable else ", ".join(filter(None, remarks))
    style = "dim" if offer.unavailable else ""
    return (
        Cell(ref, style),
        Cell(offer.zone or offer.region or "-", style),
        Cell(offer.instance_type, style),
        Cell(gpus, style),
        Cell(f"{offer.vram_gb:g}" if offer.vram_gb else "-", style),
        Cell(usd(offer.usd_per_hour), style),
        note,
    )


COMMANDS = {"gpus": gpus, "resolve": resolve}
