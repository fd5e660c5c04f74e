from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from gpu_flows.remote.errors import CannotWrite, FetchTooLarge, UnwantedArchive
from gpu_flows.remote.files import fetch
from tests.remote.boxes import on_box, signal_connections, write


@pytest.fixture
def job(server, home, tmp_path):
    """U07: a script that writes beside, above and in the home, and fails."""
    own = home.name
    script = (
        "import os, pathlib, sys\n"
        "def write(name, data):\n"
        "    path = pathlib.Path(os.path.expanduser(name)); path.parent.mkdir(parents=True, exist_ok=True)\n"
        "    path.write_bytes(data)\n"
        "write('runs/model.pt', os.urandom(3_000_000))\n"
        "write('runs/logs/a b ü.txt', b'log')\n"
        "write('../shared/metrics.json', b'{}')\n"
        f"write('~/{own}/ckpt/last.pt', os.urandom(1000))\n"
        "sys.exit(3)\n"
    )
    write(home, "code/train.py", script)
    done = on_box(server, lambda box: box.run(f"cd {home}/code && python3 train.py", timeout_s=30))
    assert done.exit_status == 3
    return f"{home}/code"


def sha256(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def test_u07_outputs_are_fetched_although_the_script_failed(server, home, job, tmp_path):
    own = home.name
    patterns = ["runs/**", f"~/{own}/ckpt/*", "../shared/metrics.json", "/etc/passwd", "plots/*.png"]

    async def scenario(box):
        return await fetch(box, patterns, tmp_path / "out", cwd=job, timeout_s=30)

    got = on_box(server, scenario)
    assert [file.name for file in got.files] == [
        "runs/logs/a b ü.txt",
        "runs/model.pt",
        f"{own}/ckpt/last.pt",
    ]
    for file in got.files:
        assert file.sha256 == sha256(file.path) == sha256(file.remote_path)
        assert file.path == tmp_path / "out" / file.name
    assert got.outside == ("../shared/metrics.json", "/etc/passwd")
    assert got.unmatched == ("plots/*.png",)
    assert got.failed == ()
    assert got.total_bytes == 3_000_000 + 3 + 1000
    assert {p.name for p in (tmp_path / "out").rglob("*") if p.is_file()} == {
        "model.pt",
        "last.pt",
        "a b ü.txt",
    }


PATTERNS = {
    "runs": {"runs/model.pt", "runs/logs/a b ü.txt"},
    "runs/": {"runs/model.pt", "runs/logs/a b ü.txt"},
    "./runs/*": {"runs/model.pt", "runs/logs/a b ü.txt"},  # a folder that matches comes whole
    "runs/*.pt": {"runs/model.pt"},
    "**/*.txt": {"runs/logs/a b ü.txt"},
    "**/model.pt": {"runs/model.pt"},
    "r?ns/m[a-o]del.pt": {"runs/model.pt"},
    "runs/../runs/model.pt": {"runs/model.pt"},
    "*": {"train.py", "runs/model.pt", "runs/logs/a b ü.txt"},
    "runs/logs/*/x": set(),
    "train.py/x": set(),
}


def test_patterns_on_a_box(server, job, tmp_path):
    async def scenario(box):
        for n, (pattern, expected) in enumerate(PATTERNS.items()):
            got = await fetch(box, [pattern], tmp_path / str(n), cwd=job, timeout_s=30)
            assert {file.name for file in got.files} == expected, pattern
            assert got.unmatched == (() if expected else (pattern,))

    on_box(server, scenario)


def test_an_absolute_pattern_within_the_working_directory(server, job, tmp_path):
    got = on_box(
        server, lambda box: fetch(box, [f"{job}/runs/*.pt"], tmp_path / "out", cwd=job, timeout_s=30)
    )
    assert [file.name for file in got.files] == ["runs/model.pt"]


def test_links_come_as_what_they_lead_to(server, home, tmp_path):
    """A checkpoint may be a link into a cache or onto a large volume; second names of one file come too."""
    write(tmp_path, "volume/blob", "weights")
    write(home, "code/runs/epoch1.pt", "epoch 1")
    (home / "code/runs/latest.pt").symlink_to("epoch1.pt")
    (home / "code/runs/far.pt").symlink_to(tmp_path / "volume/blob")
    (home / "code/runs/broken.pt").symlink_to("nowhere")
    (home / "code/runs/folder").symlink_to(tmp_path / "volume")
    os.link(home / "code/runs/epoch1.pt", home / "code/runs/hard.pt")
    os.mkfifo(home / "code/runs/pipe")
    got = on_box(
        server,
        lambda box: fetch(
            box, ["runs/**", "runs/folder/blob"], tmp_path / "out", cwd=f"{home}/code", timeout_s=30
        ),
    )
    assert {file.name: file.path.read_text() for file in got.files} == {
        "runs/epoch1.pt": "epoch 1",
        "runs/latest.pt": "epoch 1",
        "runs/far.pt": "weights",
        "runs/hard.pt": "epoch 1",
        "runs/folder/blob": "weights",
    }
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


def test_the_home_and_the_working_directory_may_hold_the_same_name(server, home, tmp_path):
    name = f"{tmp_path.name}-both"
    write(home, f"code/{name}/last.pt", "of the job")
    write(server.home, f"{name}/last.pt", "of the home")

    async def scenario(box):
        return await fetch(
            box, [f"{name}/*", f"~/{name}/*"], tmp_path / "out", cwd=f"{home}/code", timeout_s=30
        )

    got = on_box(server, scenario)
    assert {file.name: file.path.read_text() for file in got.files} == {
        f"{name}/last.pt": "of the job",
        f"home/{name}/last.pt": "of the home",
    }


def test_the_folder_of_the_jobs_is_not_reached_from_the_home(sshd, tmp_path):
    write(sshd.home, ".gpu-flows/jobs/j/secrets", "TOKEN=1")
    write(sshd.home, ".gpu-flows/jobs/j/code/out.txt", "x")
    write(sshd.home, "mine.txt", "x")

    async def scenario(box):
        cwd = "~/.gpu-flows/jobs/j/code"
        got = await fetch(box, ["~/**", "*.txt"], tmp_path / "out", cwd=cwd, timeout_s=30)
        assert {file.name for file in got.files} == {"mine.txt", "out.txt"}

    on_box(sshd, scenario)


def test_many_files_need_several_archives(server, home, tmp_path):
    folder = home / "code" / ("d" * 200) / ("e" * 200)
    folder.mkdir(parents=True)
    for n in range(600):
        (folder / f"{n}.txt").write_text(str(n))
    got = on_box(server, lambda box: fetch(box, ["**"], tmp_path / "out", cwd=f"{home}/code", timeout_s=30))
    assert sorted(int(file.path.read_text()) for file in got.files) == list(range(600))


def test_a_fetch_goes_on_after_a_lost_connection(sshd, tmp_path):
    for n in range(60):
        write(sshd.home, f"code/runs/{n:02}.pt", os.urandom(1 << 20))
    cut = []

    def progress(done, total):
        assert total == 60
        if done >= 20 and not cut:
            cut.append(done)
            signal_connections(sshd)

    async def scenario(box):
        return await fetch(box, ["runs/*"], tmp_path / "out", cwd="code", progress=progress, timeout_s=50)

    got = on_box(sshd, scenario)
    assert cut
    assert len(got.files) == 60
    assert all(file.sha256 == sha256(file.path) == sha256(file.remote_path) for file in got.files)
    assert not list((tmp_path / "out").rglob(".gpu-flows*"))


def test_a_fetch_stops_where_there_is_no_room(server, job, tmp_path):
    async def scenario(box):
        with pytest.raises(FetchTooLarge, match=r"model\.pt.*3000000 bytes"):
            await fetch(box, ["runs/**"], tmp_path / "out", cwd=job, max_bytes=1_000_000, timeout_s=30)

    on_box(server, scenario)
    assert not (tmp_path / "out/runs/model.pt").exists()
    assert not list((tmp_path / "out").rglob(".gpu-flows*"))


def test_what_is_in_the_way_here_is_named(server, job, tmp_path):
    write(tmp_path, "out/runs/model.pt/in the way", "")

    async def scenario(box):
        with pytest.raises(CannotWrite, match=r"runs/model\.pt cannot be written"):
            await fetch(box, ["runs/*.pt"], tmp_path / "out", cwd=job, timeout_s=30)

    on_box(server, scenario)


# A hostile box: its own find and tar


@pytest.fixture
def hostile(make_sshd, tmp_path):
    """A box whose programs are the attacker's."""
    programs = tmp_path / "bin"
    programs.mkdir()
    server = make_sshd({"PATH": f"{programs}:/usr/bin:/bin"})

    def program(name, text):
        path = write(programs, name, f"#!/usr/bin/python3\n{text}")
        path.chmod(0o755)

    server.program = program
    write(server.home, "code/runs/a.txt", "a")
    return server


HOSTILE = {
    "climbs": "add('../../escaped.txt', b'x')",
    "climbs from a wanted name": "add(wanted + '/../../../../escaped.txt', b'x')",
    "is absolute": "add(str(out / 'escaped.txt'), b'x')",
    "is another file": "add('./root/.bashrc', b'x')",
    "is a link": "add(wanted, kind=tarfile.SYMTYPE, link='/etc/passwd')",
    "is a link, then a file through it": (
        "add(wanted, kind=tarfile.SYMTYPE, link=str(out)); add(wanted + '/escaped.txt', b'x')"
    ),
    "is a hard link": "add(wanted, kind=tarfile.LNKTYPE, link='/etc/passwd')",
    "is a device": "add(wanted, kind=tarfile.CHRTYPE)",
    "is a pipe": "add(wanted, kind=tarfile.FIFOTYPE)",
    "is a folder": "add(wanted, kind=tarfile.DIRTYPE)",
    "is a header of a gigabyte": "add('x' , kind=b'L', size=1 << 30)",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_archive_writes_nothing(hostile, tmp_path, what):
    out = tmp_path / "deep/er/out"
    hostile.program(
        "tar",
        "import io, sys, tarfile, pathlib\n"
        f"out = pathlib.Path({str(tmp_path)!r})\n"
        "wanted = sys.argv[-1]\n"
        "archive = tarfile.open(fileobj=sys.stdout.buffer, mode='w|')\n"
        "def add(name, data=b'', kind=tarfile.REGTYPE, link='', size=None):\n"
        "    info = tarfile.TarInfo(name); info.type = kind; info.linkname = link\n"
        "    info.size = len(data) if size is None else size\n"
        "    archive.fileobj.write(info.tobuf(tarfile.GNU_FORMAT)); archive.fileobj.write(data.ljust(512, b'\\0'))\n"
        f"{HOSTILE[what]}\n"
        "archive.close()\n",
    )

    async def scenario(box):
        with pytest.raises(UnwantedArchive):
            await fetch(box, ["runs/*"], out, cwd="code", timeout_s=30)

    on_box(hostile, scenario)
    assert list(out.rglob("*")) == []
    assert not list(tmp_path.rglob("escaped.txt"))


def test_a_hostile_listing_fetches_nothing(hostile, tmp_path):
    hostile.program(
        "find",
        "import sys\n"
        "for name in ('../../x', '/etc/passwd', '/', '', 'runs/../../y'):\n"
        f"    for base in ('', '{hostile.home}/code/'):\n"
        "        sys.stdout.write(base + name + '\\0')\n",
    )
    got = on_box(hostile, lambda box: fetch(box, ["**"], tmp_path / "out", cwd="code", timeout_s=30))
    assert {file.name for file in got.files} <= {"etc/passwd"}
    assert got.failed in ((), (f"{hostile.home}/code/etc/passwd",))


def test_an_archive_that_is_cut_is_told(hostile, tmp_path):
    """tar is killed, the disk fails: what did not arrive is named."""
    hostile.program(
        "tar", "import sys; sys.stdout.write('x' * 5000); sys.stderr.write('I/O error'); sys.exit(2)"
    )
    got = on_box(hostile, lambda box: fetch(box, ["runs/*"], tmp_path / "out", cwd="code", timeout_s=30))
    assert got.files == ()
    assert got.failed == (f"{hostile.home}/code/runs/a.txt",)
    assert "I/O error" in got.complaint


def test_a_file_that_vanishes_meanwhile_is_told(hostile, tmp_path):
    write(hostile.home, "code/runs/b.txt", "b")
    hostile.program(
        "tar",
        f"import os, sys\nos.unlink('{hostile.home}/code/runs/a.txt')\nos.execv('/usr/bin/tar', sys.argv)\n",
    )
    got = on_box(hostile, lambda box: fetch(box, ["runs/*"], tmp_path / "out", cwd="code", timeout_s=30))
    assert [file.name for file in got.files] == ["runs/b.txt"]
    assert got.failed == (f"{hostile.home}/code/runs/a.txt",)
    assert "a.txt" in got.complaint
