"""What a pod runs: the dead-man, then what its image would have run."""

from __future__ import annotations

import base64
import gzip
import shlex
from functools import cache
from importlib import resources


def container_args(boot_script: str) -> str:
    """Return the ``args`` of a pod, which take the place of its image's command.

    The script travels packed, so that nothing of it is quoted: how the API splits the text is not published, but
    ``sh -c '...'`` without further quotes is what others rely on (SkyPilot's ``docker_args``). An image with an
    entrypoint of its own gets them as arguments, so it has to run them, as NVIDIA's and RunPod's images do.

    Args:
        boot_script: POSIX sh that starts the dead-man and returns.
    """
    script = f"{boot_script}\n{started_after_boot()}"
    # Without a time stamp: the same box has the same request.
    packed = base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode()
    file = "/tmp/gpu-flows-boot"  # noqa: S108 - the container is new, and nobody else is in it
    return f"sh -c 'echo {packed} | base64 -d | gzip -d >{file} && exec sh {file}'"


def terminate_command(api_url: str) -> str:
    """Return POSIX sh by which a pod ends itself, with the key that RunPod gives to every pod."""
    return f"u={shlex.quote(api_url)}\n{_script('terminate')}"


def started_after_boot() -> str:
    """Return POSIX sh that starts sshd as the image does, and never ends."""
    return _script("start")


@cache
def _script(name: str) -> str:
    text = (resources.files("gpu_flows.clouds.runpod") / "scripts" / f"{name}.sh").read_text("utf-8")
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
