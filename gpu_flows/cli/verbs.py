"""A verb of the command line: flags as data, `--` in front of a script's own arguments, errors as exit codes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from gpu_flows.cli.exits import Exit, exit_of
from gpu_flows.cli.output import Format, Output
from gpu_flows.errors import GpuFlowsError

Given = dict[str, Any]
"""What was said on the command line, by parameter; what was not said is not in it."""

Perform = Callable[[Given, Output], int]

_REST = "gpu_flows.rest"


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag, or the positional argument, of a verb.

    Attributes:
        name: The parameter that it sets, by the name that it has on every surface.
        kind: Type of the value; a list may be given several times, a bool is a switch.
        help: What it means.
        section: Heading under which the help shows it.
        spelled: Other spellings than ``--name-with-dashes``.
        metavar: What stands for the value in the help.
        words: Values that a shell may complete.
        positional: Whether it is given without a flag.
    """

    name: str
    kind: Any
    help: str
    section: str = "Options"
    spelled: tuple[str, ...] = ()
    metavar: str | None = None
    words: Sequence[str] | Callable[[], Sequence[str]] = ()
    positional: bool = False

    def parameter(self) -> inspect.Parameter:
        """Return it as typer reads it from a function's signature."""
        about: Any
        if self.positional:
            about = typer.Argument(help=self.help, metavar=self.metavar, show_default=False)
        else:
            about = typer.Option(
                *(self.spelled or (f"--{self.name.replace('_', '-')}",)),
                help=self.help,
                metavar=self.metavar,
                show_default=False,
                rich_help_panel=self.section,
                autocompletion=self._complete if self.words else None,
            )
        kind, default = (bool, False) if self.kind is bool else (self.kind | None, None)
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, about]
        )

    def _complete(self, incomplete: str) -> list[str]:
        words = self.words() if callable(self.words) else self.words
        return [word for word in words if word.lower().startswith(incomplete.lower())]


_COMMON = (
    Flag(
        "format",
        str,
        "table (on a terminal), plain (elsewhere: tab-separated), or json (one document).",
        "Output",
        metavar="FORMAT",
        words=[each.value for each in Format],
    ),
    Flag("debug", bool, "Show the traceback of an error.", "Output"),
)


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb.

    Attributes:
        perform: Does it, and returns the exit code.
        flags: What it takes.
        rest: What stands for the words behind ``--``; None where there are none.
    """

    perform: Perform
    flags: Sequence[Flag] = ()
    rest: str | None = None

    def build(self, name: str) -> Any:
        """Return it as a command."""
        flags = [*self.flags, *_COMMON]

        def callback(ctx: typer.Context, **values: Any) -> None:
            given = {key: value for key, value in values.items() if value is not None and value is not False}
            if (rest := ctx.meta.get(_REST)) is not None:
                given["rest"] = rest
            raise typer.Exit(int(_performed(self.perform, given)))

        context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        parameters = [context, *(flag.parameter() for flag in flags)]
        callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        callback.__annotations__ = {each.name: each.annotation for each in parameters}
        callback.__doc__ = self.perform.__doc__
        app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        app.command(name, cls=_Command)(callback)
        command: Any = get_command(app)
        command.rest = self.rest
        return command


class _Command(TyperCommand):
    """A command that takes what is behind ``--`` byte for byte, and shows its flags in sections."""

    rest: str | None = None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the words behind the first ``--`` from every parser."""
        if self.rest is not None and "--" in args:
            at = args.index("--")
            args, ctx.meta[_REST] = args[:at], args[at + 1 :]
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # The exception for an unknown flag is no public name of typer's, but has attributes of its own.
            if self.rest is not None and hasattr(error, "possibilities") and hasattr(error, "message"):
                error.message += (
                    f"; what is meant for the {self.rest.split()[0].lower()} itself goes behind --"
                )
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line."""
        return [*super().collect_usage_pieces(ctx), *([f"[-- {self.rest}]"] if self.rest else [])]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the flags, section by section."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                positional = param.param_type_name == "argument"
                title = "Arguments" if positional else getattr(param, "rich_help_panel", None) or "Output"
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records, col_max=26)


def _performed(perform: Perform, given: Given) -> int:
    """Do it; whatever goes wrong becomes a message and an exit code."""
    debug = given.pop("debug", False)
    output = Output()
    try:
        output = Output.of(given.pop("format", None))
        return perform(given, output)
    except BrokenPipeError:
        # Whoever read our output has seen enough (`| head`).
        output.abandon()
        return Exit.OK
    except KeyboardInterrupt:
        output.failed("INTERRUPTED", "interrupted")
        return Exit.INTERRUPTED
    except GpuFlowsError as error:
        if debug:
            output.traceback()
        output.failed(error.code, error.message, hint=error.hint, notes=getattr(error, "__notes__", ()))
        return exit_of(error)
    except Exception as error:  # noqa: BLE001 - a fault of ours; --debug shows all of it
        if debug:
            output.traceback()
        output.failed(
            "INTERNAL",
            f"gpu-flows itself failed: {type(error).__name__}: {error}",
            hint="--debug shows the traceback; please report it",
        )
        return Exit.FAILED
    finally:
        output.close()


def verb(flags: Sequence[Flag] = (), *, rest: str | None = None) -> Callable[[Perform], Verb]:
    """Make a verb of a function; its docstring becomes the help.

    Args:
        flags: What it takes.
        rest: What the words behind ``--`` are; they arrive as ``given["rest"]``.
    """
    return lambda perform: Verb(perform, flags, rest)
