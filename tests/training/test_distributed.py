from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_flows import distributed as dist
from gpu_flows.training.distributed import Card, card_settings
from tests.training import ranks

ROOT = Path(__file__).parents[2]


def in_world(number: int, size: int, items: range, even: bool) -> list[int]:
    world = {"RANK": number, "WORLD_SIZE": size, "MASTER_ADDR": "x", "MASTER_PORT": 1}
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in world.items()})
    try:
        return list(dist.shard(items, even=even))
    finally:
        for name in world:
            os.environ.pop(name)
        os.environ.update(before)


@given(st.integers(0, 30), st.integers(1, 9))
def test_shards_are_every_item_once_or_equally_many(count: int, size: int) -> None:
    parts = [in_world(number, size, range(count), even=False) for number in range(size)]
    assert sorted(item for part in parts for item in part) == list(range(count))
    parts = [in_world(number, size, range(count), even=True) for number in range(size)]
    assert {len(part) for part in parts} == {count // size}
    assert len({item for part in parts for item in part}) == count // size * size


def test_a_world_of_one_is_answered_where_it_stands() -> None:
    found = dist.run(ranks.look_around, 10, nproc=1)
    assert found["world"] == (0, 0, 1, True)
    assert found["mean"] == [0.0, 4.0]
    assert found["part"] == [0, 1, 2, 3, 4]
    assert dist.run(ranks.learn, nproc=1)[0] == "Linear"


def test_a_box_that_presets_a_part_of_a_world_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("NODE_RANK", "1")
    assert (dist.world_size(), dist.rank(), dist.is_main()) == (1, 0, True)


def test_importing_it_loads_neither_torch_nor_the_rest() -> None:
    code = (
        "import sys\n"
        "from gpu_flows import distributed as d\n"
        "d.print0(d.rank(), d.world_size(), d.is_main(), d.all_reduce_mean(2), d.run(len, 'abc', nproc=1))\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'asyncssh'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout == "0 1 True 2.0 3\n"


def test_ranks_are_spawned_and_a_result_of_any_size_comes_back() -> None:
    found = dist.run(ranks.look_around, 50_000_000, nproc=2)
    assert found["world"] == (0, 0, 2, True)
    assert found["device"] == "cpu"
    assert found["mean"] == [0.5, 4.0]
    assert found["mean of numbers"] == found["mean of integers"] == 0.5
    assert found["part"] == [0, 2, 4]
    assert found["even part"] == [0, 2]
    assert found["tensor"].tolist() == [1.0, 1.0]
    assert found["blob"] == b"x" * 50_000_000
    assert dist.world_size() == 1, "the caller is no rank"


def test_the_caller_sees_the_failing_ranks_own_traceback() -> None:
    began = time.monotonic()
    with pytest.raises(dist.RankFailed) as caught:
        dist.run(ranks.fail, "raise", nproc=2)
    assert time.monotonic() - began < 60, "rank 0 would have slept for 600 s"
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)
    text = caught.value.remote_traceback
    assert re.match(r'Traceback \(most recent call last\):\n  File ".*ranks\.py", line \d+, in fail\n', text)
    assert text.endswith("ValueError: bad batch\n")
    assert "ValueError: bad batch" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.table
def test_a_wrapped_model_has_the_mean_gradient_of_all_ranks() -> None:
    kind, gradient = dist.run(ranks.learn, nproc=2)
    assert kind == "DistributedDataParallel"
    assert gradient.tolist() == [[0.5, 0.5]]


@pytest.mark.table
@pytest.mark.parametrize(
    ("how", "code"), [("sys.exit", 37), ("os._exit", 37), ("SIGSEGV", -11), ("SIGKILL", -9)]
)
def test_however_a_rank_ends_it_is_the_one_that_is_named(how: str, code: int) -> None:
    with pytest.raises(dist.RankFailed) as caught:
        dist.run(ranks.fail, how, nproc=2)
    assert (caught.value.rank, caught.value.exit_code) == (1, code)


@pytest.mark.table
def test_ranks_die_with_their_parent_however_it_dies(tmp_path: Path, until: Callable[..., None]) -> None:
    code = (
        "from gpu_flows import distributed as d\n"
        "from tests.training import ranks\n"
        f"d.run(ranks.sleep, {str(tmp_path)!r}, nproc=2)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as parent:
        try:
            until(lambda: all((tmp_path / f"{rank}.pid").exists() for rank in (0, 1)))
        finally:
            parent.kill()
    pids = [int((tmp_path / f"{rank}.pid").read_text()) for rank in (0, 1)]
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), timeout_s=10)


@pytest.mark.table
def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from gpu_flows import distributed as d\ndef f(): pass\nd.run(f, nproc=2)\n")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], env=env, stderr=subprocess.PIPE, text=True, check=False)
    assert "before it could call the function" in done.stderr
    assert 'if __name__ == "__main__":' in done.stderr
    assert "bootstrapping phase" in done.stderr, "Python's own words are shown whole"


def test_what_cannot_be_sent_to_a_rank_is_refused_before_any_starts() -> None:
    with pytest.raises(TypeError, match="top level of a module"):
        dist.run(lambda: None, nproc=2)


PRO_6000 = Card("NVIDIA RTX PRO 6000 Blackwell Server Edition", 12)
RTX_5090 = Card("NVIDIA GeForce RTX 5090", 12)
H100 = Card("NVIDIA H100 80GB HBM3", 9)


def test_cards_get_what_they_need_and_the_users_own_wins() -> None:
    assert card_settings([PRO_6000] * 2, (2, 27, 3), "12.8", {}) == {"NCCL_P2P_DISABLE": "1"}
    assert card_settings([PRO_6000], (2, 27, 3), "12.8", {"NCCL_P2P_DISABLE": "0"}) == {}
    assert card_settings([H100, RTX_5090], (2, 26, 2), "12.8", {}) == {}
    assert card_settings([H100], (2, 19, 0), "12.1", {}) == {}


@pytest.mark.parametrize("card", [PRO_6000, RTX_5090])
def test_nccl_that_is_too_old_for_a_card_is_told_before_the_first_collective(card: Card) -> None:
    with pytest.raises(
        dist.CardUnsupported, match=r"needs NCCL 2\.26 or newer and torch uses 2\.25\.1"
    ) as caught:
        card_settings([card], (2, 25, 1), "12.8", {})
    assert "pip install -U 'nvidia-nccl-cu12>=2.26'" in str(caught.value)
