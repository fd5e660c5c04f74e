from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from gpu_flows.remote.masking import Masker
from gpu_flows.remote.rawlog import RawLog

SECRET = "hf_inventedA1"
RAW = b"".join(b"%d hf_inventedA1 hf_inventedA1hf_inventedA1 hf_inv\n" % n for n in range(200)) + b"hf_inven"
MASKED = RAW.replace(SECRET.encode(), b"***")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def assert_digests(log: RawLog, raw: bytes) -> None:
    at = 0
    for digest in log.digests:
        assert digest.start == at
        assert digest.sha256 == sha256(raw[digest.start : digest.end])
        at = digest.end
    assert at == len(raw)


def test_what_is_stored_is_masked_and_what_came_is_hashed(tmp_path):
    with RawLog(tmp_path / "log", Masker({"A": SECRET})) as log:
        for at in range(0, len(RAW), 7):
            log.write(RAW[at : at + 7])
        log.finish()
        assert log.offset == len(RAW)
        assert [d.sha256 for d in log.digests] == [sha256(RAW)]
    assert (tmp_path / "log").read_bytes() == MASKED
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
        assert SECRET.encode() not in path.read_bytes()


@pytest.mark.parametrize("seed", range(20))
def test_processes_that_continue_it_anywhere_store_the_same(tmp_path, seed):
    chance = random.Random(seed)
    masker = Masker({"A": SECRET, "B": "A1hf_i"})
    path = tmp_path / "log"
    offset = 0
    while offset < len(RAW):
        log = RawLog(path, masker)
        assert log.offset <= offset
        offset = log.offset
        for _ in range(chance.randint(0, 30)):
            log.write(RAW[offset : offset + chance.randint(1, 200)])
            offset = log.offset
        if chance.random() < 0.5:
            log.close()
        elif chance.random() < 0.5:
            log.save()
            log.write(RAW[offset : offset + 50])  # received after the last save, and lost with the process
            log._file.flush()
    log = RawLog(path, masker)
    log.write(RAW[log.offset :])
    log.finish()
    log.close()
    with RawLog(tmp_path / "other", masker) as other:
        other.write(RAW)
        other.finish()
    assert path.read_bytes() == (tmp_path / "other").read_bytes()
    assert SECRET.encode() not in path.read_bytes()
    assert_digests(log, RAW)


def test_a_log_without_secrets_keeps_one_digest_over_processes(tmp_path):
    raw = random.Random(1).randbytes(2_999_999) + b"\n"
    for end in (1_000_000, 2_500_000, len(raw)):
        with RawLog(tmp_path / "log", Masker({"A": SECRET})) as log:
            log.write(raw[log.offset : end])
    assert [(d.start, d.end, d.sha256) for d in log.digests] == [(0, len(raw), sha256(raw))]


@pytest.mark.parametrize("broken", ["", "{", "[]", '{"offset": 1}', '{"digests": 1}'])
def test_with_a_broken_state_it_is_received_anew(tmp_path, broken):
    with RawLog(tmp_path / "log") as log:
        log.write(b"abc")
    (tmp_path / "log.state").write_text(broken)
    with RawLog(tmp_path / "log") as log:
        assert log.offset == 0
    assert (tmp_path / "log").read_bytes() == b""


def test_with_a_log_shorter_than_its_state_says_it_is_received_anew(tmp_path):
    with RawLog(tmp_path / "log") as log:
        log.write(b"abc")
    Path(tmp_path / "log").write_bytes(b"ab")
    assert RawLog(tmp_path / "log").offset == 0
