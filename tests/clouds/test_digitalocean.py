"""DigitalOcean against its emulator, with real boxes behind it: the suite of every cloud, and whole runs."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpu_flows import Installation, run
from gpu_flows.clouds import open_cloud
from gpu_flows.clouds.base import Box, BoxState, Cloud
from gpu_flows.endpoint import SshEndpoint
from gpu_flows.gpus.request import GpuRequest
from gpu_flows.leases.deadman import boot_script
from gpu_flows.offers import OfferQuery
from gpu_flows.settings import Settings
from tests.clouds.contract import CloudContract
from tests.clouds.ssh_client import PUBLIC_KEY
from tests.clouds.ssh_client import run as run_over_ssh
from tests.emulators.digitalocean import DELETES_ONLY, TOKEN, DigitalOceanEmulator
from tests.emulators.http import instead


def options(emulator: DigitalOceanEmulator) -> dict[str, Any]:
    return {
        "token": TOKEN,
        "token_on_box": DELETES_ONLY,
        "base_url": emulator.url,
        "ssh_port": emulator.ssh_port,
    }


@pytest.fixture
def emulator(tmp_path: Path) -> Iterator[DigitalOceanEmulator]:
    with DigitalOceanEmulator(tmp_path / "boxes") as emulator:
        yield emulator
        assert emulator.live() == []


class TestDigitalOceanCloud(CloudContract):
    """With a token on the box, so that everything that a droplet can do is tried."""

    request_text = "H100:8"
    unknown_id = "399999999"
    public_key = PUBLIC_KEY
    secrets = (TOKEN, DELETES_ONLY)

    @pytest.fixture
    def cloud(self, emulator: DigitalOceanEmulator) -> Cloud:
        self.emulator = emulator
        return self.reopen(None)

    def reopen(self, cloud: Cloud | None) -> Cloud:
        return open_cloud("digitalocean", **options(self.emulator))

    @contextmanager
    def broken_listing(self, cloud: Cloud) -> Iterator[None]:
        self.emulator.fault("list", instead(200, {"success": False, "error": "deprecated_endpoint"}))
        yield

    def foreign_box(self, cloud: Cloud, name: str) -> str | None:
        return self.emulator.foreign(name).id if name else None

    def foreign_box_lives(self, cloud: Cloud, box_id: str) -> bool:
        row = self.emulator.book[box_id]
        return row.deletes == 0 and row.ended_at is None

    def drive(self, cloud: Cloud, box: Box, state: BoxState) -> bool:
        words = {BoxState.STARTING: "new", BoxState.RUNNING: "active", BoxState.STOPPED: "off"}
        if state not in words:
            return False
        self.emulator.starting.add(box.id)
        self.emulator.book[box.id].state = words[state]
        return True

    def in_box(self, cloud: Cloud, box: Box, command: str) -> str | None:
        return run_over_ssh(self.pinned(box), command).stdout.decode()

    def box_side(self, cloud: Cloud, box: Box, command: str) -> bool:
        text = self.emulator.as_seen_by(box.id, command)
        run_over_ssh(self.pinned(box), f"setsid sh -c {shlex.quote(text)} >/dev/null 2>&1 </dev/null &")
        return True

    def pinned(self, box: Box) -> SshEndpoint:
        """Return where a box answers with its host key, which the tests' own client insists on."""
        behind = self.emulator.endpoint(self.emulator.book[box.id])
        assert box.endpoint is not None
        assert behind is not None
        return replace(box.endpoint, host_key=behind.host_key)

    def test_the_dead_man_ends_a_droplet_that_nobody_owns_any_more(self, cloud: Cloud) -> None:
        query = OfferQuery(request=GpuRequest.parse("H100:1"))
        offer = next(each for each in cloud.offers(query) if each.unavailable is None)
        spec = self.spec(deadline=datetime.now(UTC) + timedelta(seconds=2))
        text = cloud.self_destruct(spec)
        assert text is not None
        boot = boot_script(spec.deadline, text, length_s=2, tick_s=0.2, retry_s=1)
        box = cloud.create(offer, replace(spec, boot_script=boot))
        self.until_gone(cloud, box)
        assert self.emulator.book[box.id].deletes == 1
        assert TOKEN not in str(self.emulator.book[box.id].data["body"])


@pytest.mark.parametrize("gpus", ["H100:1", "MI300X:1"])
def test_a_whole_run_rents_trains_and_gives_back(
    emulator: DigitalOceanEmulator, tmp_path: Path, gpus: str
) -> None:
    emulator.programs = tmp_path / "programs"
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.sh").write_text("echo one step\n")
    settings = Settings(namespace="team1", state=tmp_path / "state")
    with Installation(settings, cloud_options={"digitalocean": options(emulator)}) as here:
        report = run(
            "train.sh",
            gpus=gpus,
            code=tmp_path / "code",
            launcher="command",
            clouds=["digitalocean"],
            max_duration="10m",
            installation=here,
        )
    assert report.ok, report.to_json()
    (row,) = emulator.book.values()
    assert row.ended_at is not None
    assert row.data["tags"] == ["gpu-flows", "gpu-flows:gf1-team1"]


def test_pydo_itself_makes_lists_and_destroys_a_droplet(emulator: DigitalOceanEmulator) -> None:
    """The vendor's own client is content with the emulator."""
    import pydo
    from azure.core.credentials import AzureKeyCredential
    from azure.core.pipeline.policies import AzureKeyCredentialPolicy

    policy = AzureKeyCredentialPolicy(AzureKeyCredential(TOKEN), "Authorization", prefix="Bearer")
    client = pydo.Client(token=TOKEN, endpoint=emulator.url, authentication_policy=policy)
    key = client.ssh_keys.create(body={"name": "me", "public_key": PUBLIC_KEY})["ssh_key"]
    size = next(each for each in client.sizes.list(per_page=200)["sizes"] if "gpu_info" in each)
    body = {"name": "mine", "region": "tor1", "size": size["slug"], "image": "gpu-h100x1-base"}
    made = client.droplets.create(body={**body, "ssh_keys": [key["id"]]})["droplet"]
    assert client.droplets.list()["droplets"] == [], "droplets with GPUs are left out"
    assert [each["id"] for each in client.droplets.list(type="gpus")["droplets"]] == [made["id"]]
    assert client.droplets.get(made["id"])["droplet"]["name"] == "mine"
    assert client.droplets.destroy(made["id"]) is None
    assert client.droplets.get(made["id"])["id"] == "not_found", "returned, and not raised"


def test_opening_the_cloud_loads_no_client() -> None:
    text = (
        "import sys; from gpu_flows.clouds import open_cloud; open_cloud('digitalocean');"
        "print(sorted({'pydo', 'azure', 'requests'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", text], capture_output=True, check=True, text=True)
    assert output.stdout == "[]\n"
