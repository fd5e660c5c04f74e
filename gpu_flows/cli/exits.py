"""The exit codes, and which error means which; ``docs/cli.md`` shows them to users."""

from __future__ import annotations

from enum import IntEnum

from gpu_flows.errors import BadRequest, GpuFlowsError, MissingExtra


class Exit(IntEnum):
    """What the exit code of a verb says."""

    OK = 0
    FAILED = 1
    """The training failed, or something else did on the way."""
    BAD_INPUT = 2
    """Something is wrong with what was asked or with the settings; nothing was rented."""
    NOTHING_RENTED = 3
    """No cloud gave what was asked for."""
    MAY_BILL = 4
    """Something may still be billing."""
    INTERRUPTED = 130
    """Ctrl-C or SIGTERM; everything is proven to be gone."""


MAY_BILL_CODES = {"TEARDOWN_FAILED", "REAP_FAILED", "SUSPECTED_LEAK", "NOT_PROVEN_GONE"}
"""Codes of errors after which something may still be billing."""


def exit_of(error: GpuFlowsError) -> Exit:
    """Return the exit code for an error."""
    from gpu_flows.leases.provision import ProvisionError

    told = getattr(error, "exit", None)
    if isinstance(told, Exit):
        return told
    if error.code in MAY_BILL_CODES:
        return Exit.MAY_BILL
    if isinstance(error, ProvisionError):
        return Exit.NOTHING_RENTED
    if isinstance(error, BadRequest | MissingExtra):
        return Exit.BAD_INPUT
    return Exit.FAILED
