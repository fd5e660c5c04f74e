"""Where to rent: names of clouds and blocks with their credentials, opened when they are first used."""

from __future__ import annotations

import contextvars
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpu_flows.clouds import CloudRef
from gpu_flows.errors import BadRequest
from gpu_flows.progress import Listener, ignore
from gpu_flows.runs.installation import Installation
from prefect_blocks.credentials import CREDENTIALS, AwsCredentials, CloudCredentials
from prefect_blocks.liveness import FlowRunLiveness
from prefect_blocks.settings import current_settings

Account = str | CloudCredentials | Any
"""``"runpod"`` (keys from the environment), ``"runpod@prod"`` (the block saved as ``prod``), or a block."""


def refs_of(clouds: Sequence[Account] | Account | None) -> list[str] | None:
    """Return the clouds as gpu-flows writes them; None where none are named.

    Raises:
        BadRequest: When something is neither a name nor credentials.
    """
    if clouds is None:
        return None
    return [part for each in _listed(clouds) for part in _refs(each)]


def open_installation(
    clouds: Sequence[Account] | Account | None = None, *, listener: Listener = ignore
) -> Installation:
    """Return an installation that finds the credentials of its clouds in blocks.

    Args:
        clouds: Names and blocks; more clouds may be opened by their names later.
        listener: Told what happens.

    Raises:
        BadRequest: When two unsaved blocks stand for the same account.
    """
    settings = current_settings()
    return Installation(
        settings,
        cloud_options=_BlockOptions(_blocks(clouds)),
        liveness=FlowRunLiveness(settings.journals),
        listener=listener,
    )


def find_secret(source: str) -> str | None:
    """Return the value behind a secret's source: of the environment, else of the Secret block of that name.

    Args:
        source: Name of a variable, or of a block; ``HF_TOKEN`` also finds the block ``hf-token``.
    """
    from prefect.blocks.system import Secret

    if value := os.environ.get(source):
        return value
    block: Any = _load(Secret, source.lower().replace("_", "-"))
    return None if block is None else str(block.get())


class _BlockOptions(Mapping[str, Mapping[str, Any]]):
    """How each account is opened: by a block that was handed in, else by the saved one of its name."""

    def __init__(self, given: Mapping[str, CloudCredentials]) -> None:
        self._found: dict[str, Mapping[str, Any]] = {ref: block.options() for ref, block in given.items()}
        # Accounts are opened in threads, which would not see the settings of the flow run.
        self._context = contextvars.copy_context()

    def __getitem__(self, ref: str) -> Mapping[str, Any]:
        if ref not in self._found:
            block = self._context.copy().run(saved_credentials, ref)
            self._found[ref] = {} if block is None else block.options()
        return self._found[ref]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def saved_credentials(ref: str) -> CloudCredentials | None:
    """Return the block of an account; None for a default account, and where no block has its name.

    Args:
        ref: ``runpod@prod``.
    """
    parsed = CloudRef.parse(ref)
    kind = CREDENTIALS.get(parsed.cloud)
    if kind is None or parsed.account == "default":
        return None
    found: CloudCredentials | None = _load(kind, parsed.account)
    if found is None and kind is AwsCredentials:
        from prefect.blocks.core import Block

        theirs = _load(Block, f"aws-credentials/{parsed.account}")
        found = None if theirs is None else AwsCredentials.from_prefect_aws(theirs)
    return found


def _load(kind: Any, name: str) -> Any:
    try:
        return kind.load(name, _sync=True)
    except ValueError as error:
        # Prefect raises it for a block that is not there, and for one that does not fit its class any more.
        if "Unable to find block document" not in str(error):
            raise
        return None


def _blocks(clouds: Sequence[Account] | Account | None) -> dict[str, CloudCredentials]:
    found: dict[str, CloudCredentials] = {}
    for each in _listed(clouds):
        if isinstance(each, str):
            continue
        block = _ours(each)
        if block.ref in found and found[block.ref].options() != block.options():
            raise BadRequest(
                f"two blocks stand for {block.ref}", hint="save them, so that each account has a name"
            )
        found[block.ref] = block
    return found


def _listed(clouds: Sequence[Account] | Account | None) -> list[Account]:
    if clouds is None:
        return []
    return list(clouds) if isinstance(clouds, list | tuple) else [clouds]


def _refs(account: Account) -> list[str]:
    if isinstance(account, str):
        return [part.strip() for part in account.split(",") if part.strip()]
    return [_ours(account).ref]


def _ours(block: Any) -> CloudCredentials:
    if isinstance(block, CloudCredentials):
        return block
    if hasattr(block, "aws_access_key_id"):
        return AwsCredentials.from_prefect_aws(block)
    raise BadRequest(
        f"{type(block).__name__} is no cloud",
        hint="name one, or give a block of credentials such as RunPodCredentials",
    )


__all__ = ("Account", "find_secret", "open_installation", "refs_of", "saved_credentials")
