"""Where nodes meet: a free port on the first of them, and whether they reach each other at all.

Ranks listen on ports that the kernel chooses. Behind a NAT that maps a few ports, the rendezvous works and the first
collective waits in silence; so nodes are tried on such ports, both ways, before the start.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from gpu_flows.errors import GpuFlowsError
from gpu_flows.training.shipped import shipped

if TYPE_CHECKING:
    from gpu_flows.remote.ssh import RemoteBox

_NETWORK = '"$(command -v python3 || command -v python)" -c "$@"'
_NOT_ITS_OWN = 3
_ANSWER_S = 15.0
_HINT = "several nodes need a private network with all ports open between them"


class NodesCannotMeet(GpuFlowsError):
    """The boxes of one lease do not reach each other, so no training can run across them."""

    code: ClassVar[str] = "NODES_CANNOT_MEET"


async def find_port(head: RemoteBox, address: str, *, timeout_s: float) -> int:
    """Return a port that is free on the first node, outside the range of outgoing connections.

    It is taken only when torchrun starts, so a start can still find it in use: `Diagnosis.port_taken`.

    Args:
        head: The first node.
        address: The address by which the others reach it.
        timeout_s: For the whole call.

    Raises:
        NodesCannotMeet: When the address is not one of the node's own. Its ranks tell the others an address of their
            own, so behind a NAT they would not be found.
    """
    from gpu_flows.remote.errors import RemoteScriptFailed

    try:
        return int(await head.script(_NETWORK, shipped("network.py"), "port", address, timeout_s=timeout_s))
    except RemoteScriptFailed as error:
        if error.exit_status != _NOT_ITS_OWN:
            raise
        raise NodesCannotMeet(
            f"node 0 is reached at {address}, which is not an address of its own", hint=_HINT
        ) from error


async def check_nodes_meet(nodes: Sequence[tuple[RemoteBox, str]], *, timeout_s: float) -> None:
    """Try every node from every other one on ports such as ranks listen on.

    Args:
        nodes: Each box, with the address by which the others reach it.
        timeout_s: For each of the two steps.

    Raises:
        NodesCannotMeet: Naming the pairs that cannot, and why.
    """
    nonce = secrets.token_hex(16)
    callers = str(len(nodes) - 1)
    # A listener ends by itself when all have called, or when nobody will any more.
    life_s = str(2 * timeout_s)
    ports = await asyncio.gather(
        *(
            box.script(_NETWORK, shipped("network.py"), "listen", nonce, life_s, callers, timeout_s=timeout_s)
            for box, _ in nodes
        )
    )
    peers = [f"{address}:{int(port)}" for (_, address), port in zip(nodes, ports, strict=True)]
    patience_s = str(min(_ANSWER_S, timeout_s / len(nodes)))

    async def call(caller: int, box: RemoteBox) -> list[str]:
        others = [peer for number, peer in enumerate(peers) if number != caller]
        reply = await box.script(
            _NETWORK, shipped("network.py"), "dial", nonce, patience_s, *others, timeout_s=timeout_s
        )
        failed = [
            line.split(maxsplit=2) for line in reply.decode().splitlines() if line.startswith("failed ")
        ]
        return [
            f"node {caller} does not reach node {peers.index(peer)} ({peer}): {why}"
            for _, peer, why in failed
        ]

    found = await asyncio.gather(*(call(number, box) for number, (box, _) in enumerate(nodes)))
    if problems := [problem for each in found for problem in each]:
        raise NodesCannotMeet(
            f"the boxes cannot train together: {'; '.join(problems)}",
            hint=_HINT,
        )
