"""The verbs by name. A verb's own module is imported when it is called, so that help and completion are quick."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

VERBS = {
    "gpus": ("offers", "List the GPUs that can be asked for"),
    "resolve": ("offers", "Show what the clouds offer now, best first (also: offers)"),
    "check": ("accounts", "Tell for each cloud whether a run would get through; spends nothing"),
    "run": ("running", "Rent, train, fetch the outputs, and give everything back"),
    "provision": ("boxes", "Rent boxes, and keep them for launch"),
    "launch": ("running", "Run a training on boxes that are rented already"),
    "attach": ("running", "Follow a job that runs, to its end"),
    "teardown": ("boxes", "End every box of an owner, and prove it (also: down)"),
    "ps": ("boxes", "List the boxes that are rented, and what they cost"),
    "reap": ("boxes", "End boxes past their deadline, and boxes that nobody wants any more"),
    "logs": ("logs", "Show what a job wrote"),
    "ssh": ("shell", "Open a shell on a box"),
    "demo": ("demo", "Train on two boxes of this machine: the whole way in a minute"),
}
"""Every verb: the module that holds it, and what it does."""

ALIASES = {"offers": "resolve", "down": "teardown"}


class Verbs(TyperGroup):
    """The commands, loaded when one is called; lists are made without loading any."""

    _listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all verbs, in the order of the table."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a verb by its name or another name for it."""
        name = ALIASES.get(cmd_name, cmd_name)
        if name not in VERBS:
            return None
        module, summary = VERBS[name]
        if self._listing:
            return TyperCommand(name, help=summary)
        return import_module(f"gpu_flows.cli.{module}").COMMANDS[name].build(name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of verbs."""
        with self._only_listing():
            super().format_commands(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Complete the name of a verb."""
        with self._only_listing():
            return super().shell_complete(ctx, incomplete)

    @contextmanager
    def _only_listing(self) -> Iterator[None]:
        self._listing = True
        try:
            yield
        finally:
            self._listing = False


def command() -> Any:
    """Return the whole command line as one command."""
    app = typer.Typer(
        name="gpu-flows",
        cls=Verbs,
        no_args_is_help=True,
        rich_markup_mode=None,  # rich takes half a second to print a help text
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def about(
        version: bool = typer.Option(
            False, "--version", help="Show the version and exit.", is_eager=True, callback=_show_version
        ),
    ) -> None:
        """Rent GPU boxes, train on them over SSH with PyTorch DDP, and give them back."""

    group = get_command(app)
    if isinstance(group, TyperGroup):
        # Only to suggest a verb for a misspelt one.
        group.commands = {name: TyperCommand(name, help=summary) for name, (_, summary) in VERBS.items()}
    return group


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"gpu-flows {version('gpu-flows')}")
        raise typer.Exit()
