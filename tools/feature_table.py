"""The feature table of the docs, computed from what the adapters declare and the contract suite tests."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu_flows.clouds import CLOUDS
from gpu_flows.clouds.base import Capabilities

BEGIN, END = "<!-- features: make features -->", "<!-- end of features -->"
PAGE = Path(__file__).parents[1] / "docs" / "clouds" / "README.md"


def capabilities() -> dict[str, Capabilities]:
    """Return what each cloud declares, by name."""
    found = {}
    for name in sorted(CLOUDS):
        module, _, adapter = CLOUDS[name].partition(":")
        found[name] = getattr(importlib.import_module(module), adapter).capabilities
    return found


def table() -> str:
    """Return the table in Markdown."""
    columns = {
        "spot": lambda c: c.spot,
        "several boxes": lambda c: c.multi_node,
        "CPU boxes": lambda c: c.cpu,
        "a box ends its own billing": lambda c: c.self_destruct,
        "name in the create call": lambda c: c.names_at_create,
        "create may be repeated": lambda c: c.idempotent_create,
    }
    lines = [
        f"| cloud | {' | '.join(columns)} | listing lags | ready within |",
        "|---" * (len(columns) + 3) + "|",
    ]
    for name, declared in capabilities().items():
        marks = ["yes" if has(declared) else "-" for has in columns.values()]
        lines.append(
            f"| {name} | {' | '.join(marks)} | {declared.lag_s:.0f} s | {declared.ready_timeout_s / 60:.0f} min |"
        )
    return "\n".join(lines)


def main() -> None:
    """Write the table into its page."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")


if __name__ == "__main__":
    main()
