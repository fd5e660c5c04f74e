"""Local boxes for tests, and looks at them that do not go through the code under test."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gpu_flows.clouds.base import Box, BoxSpec, BoxState, Cloud
from gpu_flows.clouds.local import LocalCloud
from gpu_flows.clouds.local.layout import BoxFolder
from gpu_flows.gpus.request import GpuRequest
from gpu_flows.offers import OfferQuery
from tests.clouds.conftest import marked_processes
from tests.clouds.contract import box_name, until
from tests.clouds.ssh_client import PUBLIC_KEY

CPU = OfferQuery(request=GpuRequest.parse("cpu"))


def folder_of(cloud: Cloud, box: Box) -> BoxFolder:
    assert isinstance(cloud, LocalCloud)
    return BoxFolder(cloud.root / "boxes" / box.id)


def server_of(cloud: Cloud, box: Box) -> int:
    return int(json.loads(folder_of(cloud, box).server.read_bytes())["pid"])


def processes_of(box: Box) -> dict[int, str]:
    return marked_processes(f"GPU_FLOWS_BOX_ID={box.id}")


def spec(name: str | None = None, *, boot_script: str = "", hours: float = 1) -> BoxSpec:
    return BoxSpec(
        name=name or box_name(),
        nonce="00000000",
        owner='["cli","ends"]',
        ssh_public_key=PUBLIC_KEY,
        deadline=datetime.now(UTC) + timedelta(hours=hours),
        boot_script=boot_script,
    )


def rent(cloud: LocalCloud, **options: object) -> Box:
    return cloud.create(cloud.offers(CPU)[0], spec(**options))  # type: ignore[arg-type]


def running(cloud: LocalCloud, box: Box) -> Box:
    until(lambda: cloud.describe(box).state is BoxState.RUNNING, "the box runs")
    return cloud.describe(box)


def marked_under(root: Path) -> dict[int, str]:
    """Return every process of a box whose home lies under a folder."""
    found = {}
    for pid, command in marked_processes().items():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if os.fsencode(root) in environment:
            found[pid] = command
    return found


def awkward_cloud(folder: Path) -> Iterator[LocalCloud]:
    """Open the cloud in a folder whose name breaks everything that pastes paths into texts."""
    cloud = LocalCloud(root=folder / "o'er the büro" / "local")
    yield cloud
    for path in (cloud.root / "boxes").glob("*"):
        cloud.destroy(Box(cloud="local", id=path.name, name="", state=BoxState.RUNNING))
    assert marked_under(folder) == {}
