"""Calls that may be repeated, repeated until the box answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from gpu_flows.remote.errors import SshError

T = TypeVar("T")


async def persistently(call: Callable[[float], Awaitable[T]], *, timeout_s: float) -> T:
    """Repeat a call until the box answers or the time is up, with growing pauses that carry jitter.

    Args:
        call: Does no harm when it is repeated after a lost connection; gets the seconds that are left.
        timeout_s: For all attempts together.

    Returns:
        What the call returns.

    Raises:
        SshError: The last failure when the time is up; one that waiting does not cure at once.
    """
    from tenacity import AsyncRetrying, retry_if_exception, stop_before_delay, wait_random_exponential

    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    retrying = AsyncRetrying(
        retry=retry_if_exception(is_retryable),
        stop=stop_before_delay(timeout_s),
        wait=wait_random_exponential(multiplier=0.5, max=10),
        reraise=True,
    )

    async def attempt() -> T:
        return await call(max(0.1, deadline - loop.time()))

    return await retrying(attempt)


def is_retryable(error: BaseException) -> bool:
    """Tell whether the same call may well succeed a little later."""
    return isinstance(error, SshError) and error.retryable
