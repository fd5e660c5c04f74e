"""The command line: ``gpu-flows <verb>``. Each verb is a step, with the parameters of every other surface."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, and end the process with its exit code.

    Args:
        arguments: Words after the program's name; those of the process unless given.

    Raises:
        SystemExit: Always; ``docs/cli.md`` lists the codes.
    """
    from gpu_flows.cli.app import command

    command()(args=None if arguments is None else list(arguments), prog_name="gpu-flows")
