from __future__ import annotations

import asyncio
import os
import shutil
import subprocess

import pytest

from gpu_flows.errors import BadRequest
from gpu_flows.remote.errors import CodeChanged, RemoteScriptFailed, SshUnreachable
from gpu_flows.remote.files import fetch, scan_tree, upload_tree
from gpu_flows.remote.loop import blocking
from tests.remote.boxes import on_box, signal_connections, write


def picture(folder):
    """Everything in a folder: kind, exec bit, content."""
    seen = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name.startswith(".gpu-flows-"):
            continue
        if path.is_symlink():
            seen[name] = ("link", os.readlink(path))
        elif path.is_file():
            seen[name] = ("file", bool(path.stat().st_mode & 0o100), path.read_bytes())
    return seen


def test_a_folder_arrives_as_it_is(server, home, code):
    async def scenario(box):
        return await upload_tree(box, code, f"{home}/code", timeout_s=30)

    done = on_box(server, scenario)
    assert picture(home / "code") == picture(code)
    assert done.target == f"{home}/code"
    assert (done.files, done.unchanged, done.ignored) == (10, False, ())
    assert done.sent_bytes > done.total_bytes
    assert not list(home.glob(".gpu-flows-stage*"))
    ran = on_box(server, lambda box: box.run(f"cd {home}/code && ./run.sh", timeout_s=10))
    assert ran.stdout == b"run\n"


def test_a_target_in_the_home(server, code, tmp_path):
    async def scenario(box):
        one = await upload_tree(box, code, f"~/{tmp_path.name}/a b", timeout_s=30)
        two = await upload_tree(box, code, f"{tmp_path.name}/a b", timeout_s=30)
        for bad in ("", "/"):
            with pytest.raises(BadRequest):
                await upload_tree(box, code, bad, timeout_s=30)
        return one, two

    one, two = on_box(server, scenario)
    assert one.target == two.target == f"{server.home}/{tmp_path.name}/a b"
    assert two.unchanged


def test_an_unchanged_folder_costs_one_round_trip(server, home, code):
    async def scenario(box):
        await upload_tree(box, code, f"{home}/code", timeout_s=30)
        write(home / "code", "runs/model.pt", "an output")
        calls = []
        script = box.script

        async def counted(*arguments, **options):
            calls.append(options.get("stdin"))
            return await script(*arguments, **options)

        box.script = counted
        for path in code.rglob("*"):
            if not path.is_symlink():
                os.utime(path, (5, 5))  # a fresh checkout of the same commit
        again = await upload_tree(box, code, f"{home}/code", timeout_s=30)
        assert (again.unchanged, again.sent_bytes, calls) == (True, 0, [None])

    on_box(server, scenario)
    assert (home / "code/runs/model.pt").read_text() == "an output"


def test_only_what_has_changed_is_sent(server, home, code):
    write(code, "big.bin", os.urandom(2 << 20))

    async def scenario(box):
        first = await upload_tree(box, code, f"{home}/code", timeout_s=30)
        write(home / "code", "runs/model.pt", "an output")
        write(home / "code", "pkg/cache.txt", "an output too")
        write(code, "train.py", "print('TRAINING')\n")
        write(code, "new/deep/module.py", "")
        shutil.rmtree(code / "conf")  # a folder becomes a file
        write(code, "conf", "now a file")
        (code / "run.sh").unlink()  # a file becomes a folder
        write(code, "run.sh/main", "now below a folder")
        (code / "-rf").chmod(0o755)
        (code / "here").unlink()
        (code / "here").symlink_to("new")
        shutil.rmtree(code / "pkg")  # an output is left in it
        second = await upload_tree(box, code, f"{home}/code", timeout_s=30)
        assert first.sent_bytes > 2 << 20
        assert second.sent_bytes < 64 << 10
        assert second.total_bytes > 2 << 20
        assert not second.unchanged

    on_box(server, scenario)
    expected = picture(code)
    expected["runs/model.pt"] = ("file", False, b"an output")
    expected["pkg/cache.txt"] = ("file", False, b"an output too")
    assert picture(home / "code") == expected
    assert not list((home / "code").glob(".gpu-flows-s*"))


def test_python_runs_the_changed_file_although_it_has_the_same_size(server, home, tmp_path):
    """Python takes a .pyc for current when the time and size of the source are what they were."""
    code = tmp_path / "code"
    write(code, "module.py", "VALUE = 1\n")
    outputs = []

    async def scenario(box):
        for value in (1, 2):
            write(code, "module.py", f"VALUE = {value}\n")
            await upload_tree(box, code, f"{home}/code", timeout_s=30)
            done = await box.run(
                f"cd {home}/code && python3 -c 'import module; print(module.VALUE)'", timeout_s=30
            )
            outputs.append(done.stdout)

    on_box(server, scenario)
    assert outputs == [b"1\n", b"2\n"]


def test_a_single_file(server, home, code):
    done = on_box(server, lambda box: upload_tree(box, code / "run.sh", f"{home}/code", timeout_s=30))
    assert picture(home / "code") == {"run.sh": ("file", True, b"#!/bin/sh\necho run\n")}
    assert done.files == 1


def test_compression_arrives_the_same(server, home, code):
    write(code, "text.txt", "the same again\n" * 100_000)

    async def scenario(box):
        return await upload_tree(box, code, f"{home}/code", compress=True, timeout_s=30)

    done = on_box(server, scenario)
    assert picture(home / "code") == picture(code)
    assert done.sent_bytes < done.total_bytes / 20


def test_progress_reaches_the_total(server, home, code):
    write(code, "big.bin", os.urandom(4 << 20))
    heard = []

    async def scenario(box):
        return await upload_tree(
            box, code, f"{home}/code", progress=lambda done, total: heard.append((done, total)), timeout_s=30
        )

    done = on_box(server, scenario)
    assert heard[-1] == (done.total_bytes, done.total_bytes)
    assert len(heard) > 2
    assert heard == sorted(heard)


def test_a_file_that_changes_meanwhile_is_noticed(server, home, code):
    tree = scan_tree(code)
    write(code, "train.py", "print('TRAINING')\n")

    async def scenario(box):
        with pytest.raises(CodeChanged, match=r"train\.py was changed"):
            await upload_tree(box, tree, f"{home}/code", timeout_s=30)
        await upload_tree(box, code, f"{home}/code", timeout_s=30)

    on_box(server, scenario)
    assert picture(home / "code") == picture(code)
    assert not list(home.glob(".gpu-flows-stage*"))


def test_an_upload_that_was_cut_leaves_the_old_code_whole(sshd, code):
    """And the next attempt, over a new connection, brings the new code."""
    cut = []

    async def scenario(box):
        await upload_tree(box, code, "code", timeout_s=30)
        before = picture(sshd.home / "code")
        for n in range(40):
            write(code, f"data/{n}.bin", os.urandom(1 << 20))
        (code / "train.py").write_text("new")

        def progress(done, total):
            if done > total / 2 and not cut:
                cut.append(picture(sshd.home / "code") == before)
                signal_connections(sshd)

        return await upload_tree(box, code, "code", progress=progress, timeout_s=50)

    done = on_box(sshd, scenario)
    assert cut == [True]
    assert picture(sshd.home / "code") == picture(code)
    assert done.sent_bytes > 60 << 20
    deadline = 100
    while list((sshd.home / "code").glob(".gpu-flows-s*")) and deadline:
        deadline -= 1
        blocking(asyncio.sleep(0.05))
    assert deadline, "the stage of the upload that was cut is still there"


def test_an_upload_that_was_killed_while_it_changed_the_folder_is_repaired(server, home, code):
    async def scenario(box):
        await upload_tree(box, code, f"{home}/code", timeout_s=30)
        marker = home / "code/.gpu-flows-upload"
        _, _, manifest = marker.read_bytes().partition(b"\n")
        marker.write_bytes(b"applying\n" + manifest)
        (home / "code/train.py").write_text("half done")
        (code / "run.sh").unlink()
        return await upload_tree(box, code, f"{home}/code", timeout_s=30)

    done = on_box(server, scenario)
    assert not done.unchanged
    assert picture(home / "code") == picture(code)


def test_a_box_without_room_says_so(server, home, code):
    """/dev/full cannot be a folder; a file in the way is refused alike."""
    (home / "taken").write_text("a file")

    async def scenario(box):
        with pytest.raises(RemoteScriptFailed, match="taken"):
            await upload_tree(box, code, f"{home}/taken", timeout_s=30)

    on_box(server, scenario)


def test_missing_code_is_said_before_anything_else(tmp_path):
    with pytest.raises(BadRequest, match=r"nowhere.* does not exist"):
        scan_tree(tmp_path / "nowhere")


# A box with busybox alone


@pytest.fixture
def busybox_box(make_sshd, tmp_path):
    found = shutil.which("busybox")
    if found is None:
        pytest.skip("no busybox is installed")
    programs = tmp_path / "bin"
    programs.mkdir()
    listed = subprocess.run([found, "--list"], capture_output=True, text=True, check=True).stdout.split()
    for applet in listed:
        (programs / applet).symlink_to(found)
    return make_sshd({"PATH": str(programs)})


def test_with_nothing_but_busybox(busybox_box, code, tmp_path):
    async def scenario(box):
        which = await box.script('readlink -f "$(command -v tar)"', timeout_s=10)
        assert which.strip().endswith(b"busybox")
        for compress in (False, True):
            shutil.rmtree(busybox_box.home / "code", ignore_errors=True)
            await upload_tree(box, code, "code", compress=compress, timeout_s=30)
            assert picture(busybox_box.home / "code") == picture(code)
        shutil.rmtree(code / "pkg")
        write(code, "conf/more/deep.yaml", "new")
        again = await upload_tree(box, code, "code", timeout_s=30)
        assert again.sent_bytes < 16 << 10
        assert picture(busybox_box.home / "code") == picture(code)
        write(busybox_box.home, "code/runs/a b/mo\ndel.pt", "weights")
        (busybox_box.home / "code/runs/latest").symlink_to("a b/mo\ndel.pt")
        got = await fetch(box, ["runs/**"], tmp_path / "out", cwd="code", timeout_s=30)
        assert [file.name for file in got.files] == ["runs/a b/mo\ndel.pt", "runs/latest"]
        assert (tmp_path / "out/runs/latest").read_text() == "weights"

    on_box(busybox_box, scenario)


def test_a_box_that_has_gone_is_given_up(sshd, code, tmp_path):
    sshd.stop()

    async def scenario(box):
        with pytest.raises(SshUnreachable, match="refuses connections"):
            await upload_tree(box, code, "code", patience_s=0.5, timeout_s=600)
        with pytest.raises(SshUnreachable, match="refuses connections"):
            await fetch(box, ["*"], tmp_path / "out", cwd="code", patience_s=0.5, timeout_s=600)

    on_box(sshd, scenario)
