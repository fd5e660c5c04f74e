"""One create at a time for a team, over all processes of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpu_flows.clock import Clock
from gpu_flows.clouds.errors import NotOffered, RateLimited

_POLL_S = 0.2


@contextmanager
def turn_at(path: Path, *, timeout_s: float, clock: Clock) -> Iterator[None]:
    """Hold a file's lock; whoever dies lets go of it.

    Each caller opens the file anew, so that threads of one process wait for each other just as processes do.

    Args:
        path: The file; made if need be.
        timeout_s: How long to wait for the others.
        clock: Time and sleep.

    Raises:
        RateLimited: When the others have not ended in time.
        NotOffered: When the file cannot be made.
    """
    import fcntl

    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise NotOffered(
            f"{path} cannot be written ({error.strerror}), so creates cannot take turns",
            hint="set GPU_FLOWS_HOME to a folder that can be written",
        ) from error
    until = clock.monotonic() + timeout_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if clock.monotonic() >= until:
                    raise RateLimited(
                        f"another create of this team has not ended within {timeout_s:.0f} s"
                    ) from None
                clock.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)
