"""From "created" to "ready": the box has an address, answers SSH, and is what was promised."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpu_flows.clock import Clock
from gpu_flows.clouds.base import Box, BoxState, Cloud, ref_of
from gpu_flows.clouds.errors import BoxLost, BoxNotReady, CloudError, PriceTooHigh
from gpu_flows.leases.lease import LeasedBox

if TYPE_CHECKING:
    from gpu_flows.leases.provision import BoxCheck

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_CHECK_TIMEOUT_S = 90.0


def wait_until_ready(
    cloud: Cloud,
    leased: LeasedBox,
    *,
    check: BoxCheck,
    price_cap: float | None,
    timeout_s: float,
    clock: Clock,
) -> LeasedBox:
    """Wait until a box is ready and checked.

    Args:
        cloud: Who rents it out.
        leased: The box.
        check: Reaches it and compares it with its promise.
        price_cap: Dollars per hour that the rate the cloud now names must not exceed.
        timeout_s: How long to wait.
        clock: Time and sleep.

    Returns:
        The node with its endpoint pinned and the facts of its check.

    Raises:
        BoxLost: When the cloud says that it ended or will never run.
        BoxCheckFailed: When it is not what was promised.
        BoxNotReady: At the deadline, with what was wrong last.
        PriceTooHigh: When the rate is above the cap.
    """
    until = clock.monotonic() + timeout_s
    box, pause_s = leased.box, _FIRST_PAUSE_S
    last: CloudError | None = None
    while True:
        try:
            box = _merge(box, cloud.describe(box))
            _still_good(cloud, box, price_cap)
            if box.state is BoxState.RUNNING and box.endpoint is not None:
                left_s = max(1.0, until - clock.monotonic())
                endpoint, facts = check(box, leased.offer, timeout_s=min(_CHECK_TIMEOUT_S, left_s))
                return replace(leased, box=replace(box, endpoint=endpoint), facts=facts)
        except BoxNotReady as error:
            last = error
        except CloudError as error:
            # A cloud that does not answer for a moment says nothing about the box.
            if not error.ambiguous and error.code != "RATE_LIMITED":
                raise
            last = error
        if clock.monotonic() >= until:
            raise BoxNotReady(
                f"{ref_of(cloud)} box {box.id} was not ready after {timeout_s:.0f} s: it is {box.state}"
                + (f" at {box.endpoint.host}:{box.endpoint.port}" if box.endpoint else " and has no address")
                + (f"; last: {last.message}" if last else ""),
            ) from last
        asked_for_s = (last.retry_after_s or 0.0) if last else 0.0
        clock.sleep(max(0.0, min(max(pause_s, asked_for_s), until - clock.monotonic())))
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)


def _merge(before: Box, now: Box) -> Box:
    """Keep what a later answer leaves out."""
    return replace(
        now,
        usd_per_hour=before.usd_per_hour if now.usd_per_hour is None else now.usd_per_hour,
        created_at=now.created_at or before.created_at,
        name=now.name or before.name,
    )


def _still_good(cloud: Cloud, box: Box, price_cap: float | None) -> None:
    if not box.state.may_serve:
        reason = f": {box.state_reason}" if box.state_reason else ""
        raise BoxLost(f"{ref_of(cloud)} box {box.id} is {box.state} before it was ready{reason}")
    price = box.usd_per_hour or 0.0
    if price_cap is not None and price > price_cap * (1 + 1e-9):
        raise PriceTooHigh(
            f"{ref_of(cloud)} box {box.id} costs {price:.2f} dollars per hour, above the cap of {price_cap:.2f}",
            usd_per_hour=price,
        )
