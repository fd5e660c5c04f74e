"""Vast.ai passes the suite of the clouds, against its emulator; and what is its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_flows.clouds.base import Box, BoxSpec, BoxState, Cloud
from gpu_flows.clouds.vastai import VastaiCloud
from gpu_flows.offers import Offer
from tests.clouds.contract import CloudContract
from tests.clouds.ssh_client import PUBLIC_KEY, run
from tests.emulators.http import instead
from tests.emulators.vastai import VastaiEmulator

KEY = "vast-invented-key"


_WITH_REAL_BOXES = ("answers_ssh", "ends_its_own_billing", "boot_script_runs")
"""Tests of the suite that run something in a box; the others need no process behind it."""


@pytest.fixture
def emulator(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[VastaiEmulator]:
    backed = any(name in request.node.name for name in _WITH_REAL_BOXES)
    with VastaiEmulator(tmp_path / "boxes" if backed else None) as running:
        yield running


class TestVastaiCloud(CloudContract):
    request_text = "H100:8"
    unknown_id = "7999999"
    secrets = (KEY, "instance-key-")
    public_key = PUBLIC_KEY

    @pytest.fixture
    def cloud(self, emulator: VastaiEmulator) -> VastaiCloud:
        self.emulator = emulator
        return VastaiCloud(api_key=KEY, base_url=emulator.url)

    def reopen(self, cloud: Cloud) -> Cloud:
        return VastaiCloud(api_key=KEY, base_url=self.emulator.url)

    @contextmanager
    def broken_listing(self, cloud: Cloud) -> Iterator[None]:
        self.emulator.fault("list", *[instead(200, {"success": False, "error": "deprecated_endpoint"})] * 3)
        yield
        self.emulator.faults["list"].clear()

    def foreign_box(self, cloud: Cloud, name: str) -> str | None:
        return self.emulator.foreign(name).id

    def foreign_box_lives(self, cloud: Cloud, box_id: str) -> bool:
        return self.emulator.book[box_id].ended_at is None

    def unrentable(self, offer: Offer, spec: BoxSpec) -> tuple[Offer, BoxSpec]:
        return replace(offer, details={**offer.details, "ask": 999}), spec

    def drive(self, cloud: Cloud, box: Box, state: BoxState) -> bool:
        match state:
            case BoxState.STARTING:
                self.emulator.looks_until_running = 1000
            case BoxState.RUNNING:
                self.emulator.drive(box.id, "running")
            case BoxState.STOPPED:
                self.emulator.outbid(box.id)
            case BoxState.FAILED:
                self.emulator.drive(box.id, "exited")
            case _:
                return False
        return True

    def in_box(self, cloud: Cloud, box: Box, command: str) -> str | None:
        if self.emulator.endpoint(self.emulator.book[box.id]) is None:
            return None
        assert box.endpoint is not None
        endpoint = replace(box.endpoint, host_key=self.emulator.host_key(box.id))
        return str(run(endpoint, command).stdout.decode())

    def box_side(self, cloud: Cloud, box: Box, command: str) -> bool:
        row = self.emulator.book[box.id]
        environment = self.emulator.environment(row)
        subprocess.Popen(["/bin/sh", "-c", command], env={"PATH": os.environ["PATH"], **environment}).wait(30)
        return True
