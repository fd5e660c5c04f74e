"""What gpu-flows costs, each figure beside a peer measured in the same run: ``make bench``.

A figure from a busy machine means little; the ratio to the peer is what counts.
"""

from __future__ import annotations

import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

RUNS = 7


def cpu_of(statement: str) -> float:
    """Return the CPU seconds that a fresh interpreter spends on a statement, its own start not counted."""

    def spent(program: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", program], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return statistics.median(spent(statement) for _ in range(RUNS)) - statistics.median(
        spent("pass") for _ in range(RUNS)
    )


def cpu_here(call: Callable[[], object]) -> float:
    """Return the median CPU seconds of a call in this process."""
    figures = []
    for _ in range(RUNS):
        before = time.process_time()
        call()
        figures.append(time.process_time() - before)
    return statistics.median(figures)


def walk_dead_offers(count: int) -> None:
    """Walk offers that are all sold out, over five clouds."""
    from gpu_flows.leases.provision import ProvisionError
    from tests.emulators.clock import FakeClock
    from tests.leases.conftest import Desk

    with tempfile.TemporaryDirectory() as folder:
        desk = Desk(clock=FakeClock(), folder=Path(folder))
        clouds = [desk.cloud(f"cloud{number}") for number in range(5)]
        offers = []
        for number in range(count):
            cloud = clouds[number % 5]
            cloud.faults.create.append("no_capacity")
            offers.append(cloud.offer(region=f"r{number % 14}", instance_type=f"type{number}"))
        try:
            desk.provisioner().provision(desk.lease(), desk.terms(offers))
        except ProvisionError as error:
            assert len(error.attempts) == count
            return
        raise AssertionError("a dead offer was rented")


def judge_market(count: int) -> None:
    """Match and rank a market against a request."""
    from gpu_flows.gpus import load_catalog
    from gpu_flows.offers import Offer, match, rank
    from tests.emulators.memory import query

    cards = [variant.name for variant in load_catalog().vocabulary.variants.values()]
    market = [
        Offer(
            cloud="bench",
            instance_type=str(number),
            gpu=cards[number % len(cards)],
            gpu_count=1 + number % 8,
            region=f"r{number % 30}",
            usd_per_hour=0.1 + number % 397 / 10,
        )
        for number in range(count)
    ]
    rank(match(market, query("H100:8"), price_cap=30))


def main() -> None:
    """Measure and print one table."""
    ours = cpu_of("import gpu_flows")
    rows = [
        ("import gpu_flows", ours, "import httpx", cpu_of("import httpx"), "CPU"),
        ("gpu_flows.GpuRequest.parse", cpu_of("import gpu_flows; gpu_flows.GpuRequest.parse('H100:8')"),
         "import pydantic", cpu_of("import pydantic; pydantic.BaseModel"), "CPU"),
        ("import gpu_flows.cli", cpu_of("import gpu_flows.cli"), "import typer", cpu_of("import typer"), "CPU"),
    ]  # fmt: skip
    offers = 100
    walked = cpu_here(lambda: walk_dead_offers(offers))
    judged = cpu_here(lambda: judge_market(32_000))
    print(f"{platform.machine()}, Python {platform.python_version()}, medians of {RUNS} runs\n")
    print(f"{'what':<34}{'ms':>9}   {'peer':<20}{'ms':>9}{'ratio':>8}")
    for what, figure, peer, other, _ in rows:
        print(f"{what:<34}{figure * 1e3:>9.1f}   {peer:<20}{other * 1e3:>9.1f}{figure / other:>8.2f}")
    print(
        f"{'one dead offer of ' + str(offers):<34}{walked / offers * 1e3:>9.2f}   CPU, intent synced to disk"
    )
    print(f"{'32,000 offers for H100:8':<34}{judged * 1e3:>9.1f}   CPU")


if __name__ == "__main__":
    main()
