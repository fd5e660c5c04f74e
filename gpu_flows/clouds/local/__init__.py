"""The embedded cloud: boxes on this machine, each with an SSH endpoint on loopback and a home of its own.

It is a real cloud in small, so that the same code runs there as anywhere: create, wait, SSH, upload, detached
job, log, dead-man, teardown. It needs Linux, and nothing beyond the package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_flows.clouds.local.cloud import LocalCloud as LocalCloud


def __getattr__(name: str) -> Any:
    # Late, since the first process of every box imports this package and has to be quick.
    if name == "LocalCloud":
        from gpu_flows.clouds.local.cloud import LocalCloud

        return LocalCloud
    raise AttributeError(name)
