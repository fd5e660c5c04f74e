"""The promised-box check: reach a box over SSH, and compare it with its offer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpu_flows.clouds.base import Box
from gpu_flows.clouds.errors import BoxCheckFailed, BoxNotReady
from gpu_flows.endpoint import SshEndpoint
from gpu_flows.errors import BadRequest
from gpu_flows.offers import Offer
from gpu_flows.runs.installation import Installation

_GRACE_S = 15.0


class NotPinned(BadRequest):
    """Nobody here knows the host key of a box, so it must not be told a secret."""

    code = "NOT_PINNED"


class SshCheck:
    """Reaches boxes with the keys of an installation; a `gpu_flows.leases.provision.BoxCheck`.

    Args:
        installation: Whose keys and connections.
        namespace: Whose key opens the boxes.
        pins: Host keys of an earlier contact, by the id of the box.
        needs_pins: Refuse a box whose host key nobody here knows: secrets are to be sent.
        inspects: Compare the box with its promise; else it only has to be reached.
    """

    def __init__(
        self,
        installation: Installation,
        namespace: str,
        *,
        pins: Mapping[str, str] | None = None,
        needs_pins: bool = False,
        inspects: bool = True,
    ) -> None:
        self._installation = installation
        self._namespace = namespace
        self._pins = pins or {}
        self._needs_pins = needs_pins
        self._inspects = inspects

    def __call__(
        self, box: Box, offer: Offer | None, *, timeout_s: float
    ) -> tuple[SshEndpoint, Mapping[str, Any]]:
        """Reach a box and check it; see `BoxCheck`."""
        from gpu_flows.remote.errors import HostKeyChanged, SshError
        from gpu_flows.remote.loop import blocking
        from gpu_flows.training.preflight import check_box

        remote = self._installation.remote(self._pinned(box), self._namespace)

        async def reach() -> Mapping[str, Any]:
            await remote.wait_until_reachable(deadline_s=timeout_s)
            if not self._inspects:
                return {}
            facts = await check_box(remote, box, offer, timeout_s=timeout_s)
            return facts.to_json()

        try:
            facts = blocking(reach(), 2 * timeout_s + _GRACE_S)
        except HostKeyChanged as error:
            raise BoxCheckFailed(
                f"box {box.id} shows another host key than before: {error.message}"
            ) from error
        except (SshError, TimeoutError) as error:
            raise BoxNotReady(f"box {box.id} does not answer SSH yet: {error}") from error
        return remote.endpoint, facts

    def _pinned(self, box: Box) -> Box:
        """Return the box with the host key of the first contact, where that is known."""
        if box.endpoint is not None and box.id in self._pins:
            box = replace(box, endpoint=replace(box.endpoint, host_key=self._pins[box.id]))
        if self._needs_pins and (box.endpoint is None or box.endpoint.host_key is None):
            raise NotPinned(
                f"nobody here knows the host key of {box.cloud} box {box.id}, so no secret is sent to it",
                hint="launch from the machine that provisioned it, or provision it again",
            )
        return box

    def job_started(self, box: Box) -> bool:
        """Tell whether a job was started on a box; one that cannot be asked counts as without a job."""
        from gpu_flows.remote.errors import SshError
        from gpu_flows.remote.jobs import list_jobs
        from gpu_flows.remote.loop import blocking

        if box.endpoint is None:
            return False
        try:
            remote = self._installation.remote(self._pinned(box), self._namespace)
            return bool(blocking(list_jobs(remote, timeout_s=_GRACE_S), 2 * _GRACE_S))
        except (SshError, TimeoutError):
            return False
