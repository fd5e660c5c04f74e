"""The dead-man's heartbeat as the training room asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_flows.remote.ssh import RemoteBox


class DeadmanHeartbeat:
    """Speaks to the dead-man of `gpu_flows.leases.deadman`; a `gpu_flows.training.launch.Heartbeat`."""

    async def arm(self, box: RemoteBox, *, silence_s: float, timeout_s: float) -> None:
        """Let the box end itself after so many seconds of silence."""
        from gpu_flows.leases.deadman import arm_heartbeat

        await arm_heartbeat(box, silence_s=silence_s, timeout_s=timeout_s)

    async def renew(self, box: RemoteBox, *, timeout_s: float) -> None:
        """Break the silence; a dead-man that was killed or stopped is started again.

        Raises:
            DeadmanError: When it has fired, so that the box is about to end, or cannot be started.
        """
        from gpu_flows.leases.deadman import DeadmanError, renew

        state = await renew(box, timeout_s=timeout_s)
        if state.fired is not None:
            raise DeadmanError(f"the box's dead-man has fired ({state.fired.why}): the box is ending itself")

    async def disarm(self, box: RemoteBox, *, timeout_s: float) -> None:
        """Leave the box its deadline alone."""
        from gpu_flows.leases.deadman import disarm_heartbeat

        await disarm_heartbeat(box, timeout_s=timeout_s)
