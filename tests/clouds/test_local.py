from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpu_flows.clouds.base import Box, BoxState, Cloud
from gpu_flows.clouds.local import LocalCloud
from gpu_flows.clouds.local.layout import BoxFolder
from gpu_flows.gpus.request import GpuRequest
from gpu_flows.offers import OfferQuery
from tests.clouds.conftest import marked_processes
from tests.clouds.contract import CloudContract, until
from tests.clouds.ssh_client import PUBLIC_KEY, run

CPU = OfferQuery(request=GpuRequest.parse("cpu"))


def folder_of(cloud: Cloud, box: Box) -> BoxFolder:
    assert isinstance(cloud, LocalCloud)
    return BoxFolder(cloud.root / "boxes" / box.id)


def server_of(cloud: Cloud, box: Box) -> int:
    import json

    return int(json.loads(folder_of(cloud, box).server.read_bytes())["pid"])


def processes_of(box: Box) -> dict[int, str]:
    return marked_processes(f"GPU_FLOWS_BOX_ID={box.id}")


class TestLocalCloud(CloudContract):
    request_text = "cpu"
    unknown_id = "box-000000000000"
    public_key = PUBLIC_KEY

    @pytest.fixture
    def cloud(self, tmp_path: Path) -> Iterator[LocalCloud]:
        cloud = LocalCloud(root=tmp_path / "local", usd_per_hour=1.5)
        yield cloud
        for box in cloud.find(""):
            cloud.destroy(box)

    def reopen(self, cloud: Cloud) -> Cloud:
        assert isinstance(cloud, LocalCloud)
        return LocalCloud(root=cloud.root)

    @contextmanager
    def broken_listing(self, cloud: Cloud) -> Iterator[None]:
        assert isinstance(cloud, LocalCloud)
        record = next((cloud.root / "boxes").iterdir()) / "box.json"
        whole = record.read_bytes()
        record.write_bytes(whole[:40])
        yield
        record.write_bytes(whole)

    def foreign_box(self, cloud: Cloud, name: str) -> str | None:
        return cloud.create(cloud.offers(CPU)[0], self.spec(name)).id if name else None

    def foreign_box_lives(self, cloud: Cloud, box_id: str) -> bool:
        return bool(marked_processes(f"GPU_FLOWS_BOX_ID={box_id}"))

    def drive(self, cloud: Cloud, box: Box, state: BoxState) -> bool:
        match state:
            case BoxState.STARTING:
                os.kill(server_of(cloud, box), signal.SIGSTOP)
                folder_of(cloud, box).endpoint.unlink(missing_ok=True)
            case BoxState.RUNNING:
                self.until_running(cloud, box)
            case BoxState.FAILED:
                os.kill(server_of(cloud, box), signal.SIGKILL)
                until(lambda: cloud.describe(box).state is state, "the death of the server shows")
            case BoxState.ENDING:
                folder_of(cloud, box).ending.touch()
            case _:
                return False
        return True

    def in_box(self, cloud: Cloud, box: Box, command: str) -> str | None:
        assert box.endpoint is not None
        return run(box.endpoint, command).stdout.decode()

    def box_side(self, cloud: Cloud, box: Box, command: str) -> bool:
        assert box.endpoint is not None
        # As the dead-man does it: a process of the box that its own end takes along.
        run(box.endpoint, f"setsid sh -c {shlex.quote(command)} >/dev/null 2>&1 </dev/null &")
        return True
