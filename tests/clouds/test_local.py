from __future__ import annotations

import os
import shlex
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_flows.clouds.base import Box, BoxState, Cloud
from gpu_flows.clouds.errors import CloudError, NotOffered, RequestRefused
from gpu_flows.clouds.local import LocalCloud
from gpu_flows.gpus.request import GpuRequest
from gpu_flows.offers import Offer, OfferQuery
from tests.clouds.conftest import marked_processes
from tests.clouds.contract import CloudContract, box_name, until
from tests.clouds.local_boxes import CPU, folder_of, server_of
from tests.clouds.ssh_client import PUBLIC_KEY, run


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


@pytest.fixture
def cloud(tmp_path: Path) -> LocalCloud:
    return LocalCloud(root=tmp_path / "local")


def offer_for(cloud: LocalCloud, request: str, **wanted: object) -> list[Offer]:
    return cloud.offers(OfferQuery(request=GpuRequest.parse(request), **wanted))  # type: ignore[arg-type]


def test_only_alternatives_that_ask_for_cores_have_an_offer(cloud: LocalCloud) -> None:
    assert [offer.alternative for offer in offer_for(cloud, "H100:8, cpu, A100:8, cpu:2")] == [1, 3]
    assert offer_for(cloud, "cpu")[0].unavailable is None
    (none,) = offer_for(cloud, "H100:8")
    assert none.unavailable is not None
    assert "no GPUs" in none.unavailable


def test_more_than_this_machine_has_is_unavailable_with_the_reason(cloud: LocalCloud) -> None:
    (offer,) = offer_for(cloud, "cpu:5000")
    assert offer.unavailable is not None
    assert "5000 processor cores" in offer.unavailable
    (offer,) = offer_for(cloud, "cpu", disk_gb=10**7)
    assert offer.unavailable is not None
    assert "GB are free" in offer.unavailable


def test_a_price_can_be_named_and_stays_with_the_box(tmp_path: Path) -> None:
    cloud = LocalCloud(root=tmp_path / "local", usd_per_hour=2.5)
    (offer,) = offer_for(cloud, "cpu")
    assert offer.usd_per_hour == 2.5
    box = cloud.create(offer, TestLocalCloud().spec())
    assert LocalCloud(root=tmp_path / "local").describe(box).usd_per_hour == 2.5
    cloud.destroy(box)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "Has Spaces"}, "not a name"),
        ({"name": ""}, "not a name"),
        ({"name": "x" * 64}, "not a name"),
        ({"ssh_public_key": "ssh-ed25519 AAAA\nssh-ed25519 BBBB"}, "not one line"),
        ({"ssh_public_key": 'command="x" ssh-ed25519 AAAA'}, "not one line"),
        ({"ssh_public_key": "-----BEGIN OPENSSH PRIVATE KEY-----"}, "not one line"),
        ({"image": "pytorch/pytorch"}, "boots no image"),
    ],
)
def test_what_cannot_be_made_is_refused_before_anything_is(
    cloud: LocalCloud, changes: dict[str, str], said: str
) -> None:
    with pytest.raises(CloudError, match=said) as error:
        cloud.create(offer_for(cloud, "cpu")[0], replace(TestLocalCloud().spec(), **changes))  # type: ignore[arg-type]
    assert not error.value.ambiguous
    assert cloud.find("") == []


@pytest.mark.parametrize("box_id", ["../../etc", "box-", "box-00000000000G", "b", "box-0000000000000"])
def test_an_id_that_was_never_given_out_reaches_no_file(cloud: LocalCloud, box_id: str) -> None:
    box = Box(cloud="local", id=box_id, name="", state=BoxState.RUNNING)
    for call in (cloud.destroy, cloud.describe):
        with pytest.raises(RequestRefused):
            call(box)
    with pytest.raises(RequestRefused):
        cloud.destroy(replace(box, cloud="runpod", id="box-000000000000"))


def test_other_systems_get_one_clear_error(cloud: LocalCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    offer = offer_for(cloud, "cpu")[0]
    monkeypatch.setattr("sys.platform", "darwin")
    (unavailable,) = offer_for(cloud, "cpu")
    assert unavailable.unavailable is not None
    assert "needs Linux" in unavailable.unavailable
    with pytest.raises(NotOffered, match="needs Linux"):
        cloud.create(offer, TestLocalCloud().spec())
    assert cloud.find("") == []


def test_accounts_are_apart(tmp_path: Path) -> None:
    one, other = LocalCloud(root=tmp_path / "local"), LocalCloud("team_a", root=tmp_path / "local")
    box = one.create(offer_for(one, "cpu")[0], TestLocalCloud().spec())
    assert other.find("") == []
    assert one.identity_secrets() != other.identity_secrets()
    one.destroy(box)


def test_the_folder_follows_the_installation_s_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_FLOWS_HOME", str(tmp_path / "home"))
    assert LocalCloud().root == tmp_path / "home" / "local"
    monkeypatch.delenv("GPU_FLOWS_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert LocalCloud().root == tmp_path / "data" / "gpu-flows" / "local"


def test_first_calls_at_once_agree_on_one_secret_that_nobody_else_can_read(cloud: LocalCloud) -> None:
    with ThreadPoolExecutor(8) as pool:
        secrets = set(pool.map(lambda _: cloud.identity_secrets(), range(8)))
    assert len(secrets) == 1
    path = cloud.root / "identity"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in cloud.root.iterdir()] == ["identity"]
    path.chmod(0o640)
    with pytest.raises(CloudError, match="others can read"):
        cloud.identity_secrets()
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(CloudError, match="damaged"):
        cloud.identity_secrets()


REDUCE = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print("total", total.item(), "of", dist.get_world_size(), flush=True)
"""


def test_two_boxes_are_two_nodes_of_one_torchrun(cloud: LocalCloud) -> None:
    offer = offer_for(cloud, "cpu")[0]
    boxes = [cloud.create(offer, TestLocalCloud().spec(box_name(node=node))) for node in range(2)]
    try:
        until(lambda: all(cloud.describe(box).state is BoxState.RUNNING for box in boxes), "both run")
        boxes = [cloud.describe(box) for box in boxes]
        master = boxes[0].private_address
        assert master is not None
        with socket.socket() as probe:
            probe.bind((master, 0))
            port = probe.getsockname()[1]

        def node(rank: int) -> bytes:
            endpoint = boxes[rank].endpoint
            assert endpoint is not None
            command = (
                "cat > reduce.py; GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 exec torchrun --nnodes 2 "
                f"--nproc-per-node 1 --node-rank {rank} --master-addr {master} --master-port {port} reduce.py"
            )
            result = run(endpoint, command, REDUCE.encode())
            assert result.exit_status == 0, result.stderr
            return bytes(result.stdout)

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(node, range(2))) == [b"total 3.0 of 2\n"] * 2
    finally:
        for box in boxes:
            cloud.destroy(box)
