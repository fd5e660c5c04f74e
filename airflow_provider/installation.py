"""gpu-flows as a task of Airflow uses it: its settings, its connections as credentials, its log."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from airflow_provider._compat import AirflowNotFoundException
from airflow_provider.hooks import hook_for
from airflow_provider.liveness import AirflowLiveness
from airflow_provider.settings import airflow_settings
from gpu_flows.clouds import CloudRef
from gpu_flows.leases.liveness import JournalLiveness, OwnerLiveness
from gpu_flows.progress import Progress
from gpu_flows.runs.installation import Installation

_LOUD = ("failed", "lost", "silent", "unwritable", "unreadable", "missing", "unkillable", "unknown")


class ConnectionOptions(Mapping[str, Mapping[str, Any]]):
    """The arguments by which each account is opened, read from its connection when it is first needed.

    ``runpod`` is the connection ``runpod_default``, ``runpod@team_a`` the connection ``team_a``. Where there
    is no such connection the adapter looks for itself, in the environment of the worker.
    """

    def __init__(self) -> None:
        self._known: dict[str, Mapping[str, Any]] = {}

    def __getitem__(self, ref: str) -> Mapping[str, Any]:
        if ref not in self._known:
            self._known[ref] = _read(CloudRef.parse(ref))
        return self._known[ref]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def _read(ref: CloudRef) -> Mapping[str, Any]:
    hook = hook_for(ref)
    if hook is None:
        return {}
    try:
        return hook.options()
    except AirflowNotFoundException:
        return {}


def open_installation(log: Any, *, liveness: OwnerLiveness | None = None) -> Installation:
    """Open the installation for one task, in the worker; use it in a ``with``.

    Args:
        log: Where what happens is told.
        liveness: Knows whether owners still want their boxes; Airflow unless given.
    """
    settings = airflow_settings()
    return Installation(
        settings,
        cloud_options=ConnectionOptions(),
        liveness=liveness or AirflowLiveness(JournalLiveness(settings.journals)),
        listener=lambda progress: tell(log, progress),
    )


def tell(log: Any, progress: Progress) -> None:
    """Write what happens into a task's log."""
    if not progress.message:
        return
    level = logging.WARNING if progress.kind.endswith(_LOUD) else logging.INFO
    log.log(level, "%s: %s", progress.step, progress.message)


def find_secret(source: str) -> str | None:
    """Return the value behind a secret's source, masked in Airflow's logs from then on.

    Args:
        source: ``conn:ID`` for a connection's password, ``var:NAME`` for a Variable; a bare name is a
            variable of the worker's environment, else a Variable of Airflow.
    """
    from airflow_provider._compat import mask

    kind, colon, name = source.partition(":")
    sources: dict[str, Callable[[str], str | None]] = {"conn": _password, "var": _variable}
    value = sources[kind](name) if colon and kind in sources else os.environ.get(source) or _variable(source)
    mask(value)
    return value


def _password(conn_id: str) -> str | None:
    from airflow.sdk import BaseHook

    try:
        return BaseHook.get_connection(conn_id).password
    except AirflowNotFoundException:
        return None


def _variable(name: str) -> str | None:
    from airflow.sdk import Variable

    value = Variable.get(name, default=None)
    return None if value is None else str(value)
