"""The registry on disk: what it makes of damage, foreign files, a full disk, and of what boxes leave behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpu_flows.clouds.base import BoxState
from gpu_flows.clouds.errors import CapacityUnavailable, UnexpectedAnswer
from gpu_flows.clouds.local import LocalCloud
from gpu_flows.clouds.local import registry as registry_module
from gpu_flows.clouds.local.layout import BoxFolder
from tests.clouds.local_boxes import awkward_cloud, folder_of, processes_of, rent, running


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[LocalCloud]:
    yield from awkward_cloud(tmp_path)


def damage_record(folder: BoxFolder) -> None:
    folder.record.write_text('{"id": "box-')


def lose_record(folder: BoxFolder) -> None:
    folder.record.unlink()


def list_record(folder: BoxFolder) -> None:
    folder.record.write_text("[]")


def numbers_for_names(folder: BoxFolder) -> None:
    folder.record.write_text(json.dumps({**json.loads(folder.record.read_bytes()), "name": 7}))


def record_of_another(folder: BoxFolder) -> None:
    data = json.loads(folder.record.read_bytes())
    folder.record.write_text(json.dumps({**data, "id": "box-000000000000"}))


def damage_endpoint(folder: BoxFolder) -> None:
    folder.endpoint.write_text("{}")


def damage_server(folder: BoxFolder) -> None:
    folder.server.write_text("")


@pytest.mark.parametrize(
    "damage",
    [
        damage_record,
        lose_record,
        list_record,
        numbers_for_names,
        record_of_another,
        damage_endpoint,
        damage_server,
    ],
)
def test_c05_what_cannot_be_understood_is_an_error_and_can_still_be_ended(
    cloud: LocalCloud, damage: Callable[[BoxFolder], None]
) -> None:
    box = running(cloud, rent(cloud))
    damage(folder_of(cloud, box))
    with pytest.raises(UnexpectedAnswer) as error:
        cloud.find("gf1-nobody-" if damage not in (damage_endpoint, damage_server) else "")
    assert box.id in str(error.value)
    cloud.destroy(box)
    assert processes_of(box) == {}
    assert cloud.find("") == []
    gone = cloud.describe(box)
    assert gone.state is BoxState.GONE
    assert (gone.ended_at is None) is (damage is lose_record)


def test_c05_a_foreign_file_among_the_boxes_is_not_passed_over(cloud: LocalCloud) -> None:
    rent(cloud)
    stray = cloud.root / "boxes" / "notes.txt"
    stray.write_text("")
    with pytest.raises(UnexpectedAnswer, match=r"notes\.txt"):
        cloud.find("")
    stray.unlink()
    assert len(cloud.find("")) == 1


def test_a_registry_that_cannot_be_read_is_not_an_empty_one(cloud: LocalCloud) -> None:
    assert cloud.find("") == []
    cloud.root.mkdir(parents=True)
    (cloud.root / "boxes").write_text("")
    with pytest.raises(UnexpectedAnswer):
        cloud.find("")
    (cloud.root / "boxes").unlink()


def test_files_without_permissions_and_links_out_of_the_box(cloud: LocalCloud, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("data")
    box = running(cloud, rent(cloud))
    home = folder_of(cloud, box).home
    (home / "out").symlink_to(outside)
    (home / "closed" / "deeper").mkdir(parents=True)
    (home / "closed" / "deeper" / "file").write_text("")
    (home / "closed" / "deeper").chmod(0)
    (home / "closed").chmod(0)
    cloud.destroy(box)
    assert list((cloud.root / "trash").iterdir()) == []
    assert (outside / "precious").read_text() == "data"


def test_the_end_of_a_box_is_remembered_but_not_for_ever(
    cloud: LocalCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "_ENDED_KEPT", 3)
    begin = datetime.now(UTC)
    boxes = [rent(cloud) for _ in range(5)]
    for box in boxes:
        cloud.destroy(box)
    gone = cloud.describe(boxes[-1])
    assert gone.name == boxes[-1].name
    assert gone.ended_at is not None
    assert begin - timedelta(seconds=1) < gone.ended_at < datetime.now(UTC) + timedelta(seconds=1)
    assert 3 <= len(list((cloud.root / "ended").iterdir())) <= 4
    forgotten = cloud.describe(boxes[0])
    assert (forgotten.state, forgotten.ended_at) == (BoxState.GONE, None)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("a small disk can only be mounted by root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_makes_no_box_and_keeps_none(small_disk: Path) -> None:
    cloud = LocalCloud(root=small_disk / "local")
    box = running(cloud, rent(cloud))
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space"), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(CapacityUnavailable, match="No space left"):
        rent(cloud)
    assert [b.id for b in cloud.find("")] == [box.id]
    cloud.destroy(box)
    gone = cloud.describe(box)
    assert gone.state is BoxState.GONE
    assert gone.ended_at is not None
    assert processes_of(box) == {}
    assert list((cloud.root / "staging").iterdir()) == []


def test_what_is_mounted_in_a_box_is_not_removed_with_it(cloud: LocalCloud, tmp_path: Path) -> None:
    box = running(cloud, rent(cloud))
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("kept")
    inside = folder_of(cloud, box).home / "mnt é"
    inside.mkdir()
    mounted = subprocess.run(
        ["mount", "--bind", str(precious), str(inside)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting needs root")
    try:
        cloud.destroy(box)
        assert cloud.describe(box).state is BoxState.GONE
        assert (precious / "data").read_text() == "kept"
    finally:
        subprocess.run(["umount", str(cloud.root / "trash" / box.id / "home" / "mnt é")], check=True)
    rent(cloud)
    assert list((cloud.root / "trash").iterdir()) == []


def test_a_stale_folder_of_a_maker_that_was_killed_is_removed(cloud: LocalCloud) -> None:
    rent(cloud)
    stale, fresh = cloud.root / "staging" / "box-00000000000a", cloud.root / "staging" / "box-00000000000b"
    for path in (stale, fresh):
        path.mkdir()
    os.utime(stale, (0, 0))
    rent(cloud)
    assert list((cloud.root / "staging").iterdir()) == [fresh]
    shutil.rmtree(fresh)
