from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from gpu_flows.errors import BadRequest
from gpu_flows.remote.errors import (
    CannotWrite,
    CodeChanged,
    FetchTooLarge,
    RemoteScriptFailed,
    SshUnreachable,
    UnwantedArchive,
)
from gpu_flows.remote.files import fetch, scan_tree, upload_tree
from gpu_flows.remote.loop import blocking
from gpu_flows.remote.ssh import RemoteBox


def on_box(server, scenario, **options):
    async def whole():
        async with RemoteBox(server.endpoint, server.private_key, **options) as box:
            return await scenario(box)

    return blocking(whole(), 60)


@pytest.fixture
def home(server, tmp_path):
    """A folder of this test's own in the home of a shared server."""
    folder = server.home / tmp_path.name
    folder.mkdir()
    return folder


@pytest.fixture
def code(tmp_path):
    folder = tmp_path / "my proj"
    write(folder, "train.py", "print('training')\n")
    write(folder, "pkg/__init__.py", "")
    write(folder, "pkg/größe 漢字.txt", "ümlaut")
    write(folder, "run.sh", "#!/bin/sh\necho run\n").chmod(0o755)
    write(folder, "conf/base.yaml", "lr: 1\n")
    (folder / "conf/current.yaml").symlink_to("base.yaml")
    (folder / "here").symlink_to("pkg")
    write(folder, "n" * 150 + "/" + "m" * 120 + ".txt", "long names")
    write(folder, "with\nnewline and \\backslash", "odd")
    write(folder, "-rf", "dash")
    return folder


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def git(folder, *arguments):
    subprocess.run(
        ["git", "-c", "user.name=n", "-c", "user.email=e@x", *arguments],
        cwd=folder,
        check=True,
        capture_output=True,
    )


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


# Uploads


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
                for pid in sshd.connections():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

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


# What is code (C47)


def names(tree):
    return {entry.path for entry in tree.entries}


def test_c47_ignored_files_are_named_and_include_overrides(server, home, tmp_path):
    folder = tmp_path / "my proj"
    write(folder, "train.py", "open('data/train.csv')\n")
    write(folder, "data/train.csv", "1,2\n")
    write(folder, "data/raw/huge.bin", "x")
    write(folder, ".env", "TOKEN=1")
    write(folder, "notes.local", "private")
    write(folder, "new.py", "untracked, but not ignored\n")
    write(folder, ".gitignore", "data/\n.env\n")
    git(folder, "init")
    write(folder, ".git/info/exclude", "*.local\n")
    git(folder, "add", "train.py", ".gitignore")
    git(folder, "commit", "-m", "x")
    tree = scan_tree(folder)
    assert names(tree) == {"train.py", "new.py", ".gitignore"}
    assert tree.ignored == (".env", "data/", "notes.local")
    tree = scan_tree(folder, ["data/train.csv", ".env"])
    assert names(tree) == {"train.py", "new.py", ".gitignore", "data/train.csv", ".env"}
    assert tree.ignored == ("data/", "notes.local")  # part of data/ is still left out
    for pattern in ("data", "data/", "data/**", "da*"):
        assert scan_tree(folder, [pattern]).ignored == (".env", "notes.local")
    done = on_box(
        server,
        lambda box: upload_tree(box, folder, f"{home}/code", include=["data/**"], timeout_s=30),
    )
    assert (home / "code/data/train.csv").read_text() == "1,2\n"
    assert done.ignored == (".env", "notes.local")


@pytest.mark.parametrize("pattern", ["nothing/**", "*.parquet"])
def test_c47_an_include_that_matches_nothing_is_an_error(code, pattern):
    with pytest.raises(BadRequest, match="matches nothing"):
        scan_tree(code, [pattern])


@pytest.mark.parametrize("pattern", ["../secret", "/etc/passwd", "a/../../b", ""])
def test_an_include_that_leads_outside_is_an_error(code, pattern):
    with pytest.raises(BadRequest, match="has to be a glob below"):
        scan_tree(code, [pattern])


def test_git_checkouts_of_every_shape(tmp_path):
    """Submodules, a checkout within, deleted and renamed files, a work tree, a subfolder, an ignored subfolder."""
    inner = tmp_path / "inner"
    write(inner, "lib.py", "")
    write(inner, "skip.log", "")
    write(inner, ".gitignore", "*.log\n")
    git(inner, "init")
    git(inner, "add", "lib.py", ".gitignore")
    git(inner, "commit", "-m", "x")
    outer = tmp_path / "outer"
    write(outer, "main.py", "")
    write(outer, "deleted.py", "")
    write(outer, "pkg/data/loader.py", "")
    git(outer, "init")
    git(outer, "add", ".")
    git(outer, "-c", "protocol.file.allow=always", "submodule", "add", str(inner), "sub")
    git(outer, "commit", "-m", "x")
    (outer / "deleted.py").unlink()
    write(outer, "sub/extra.log", "ignored in the submodule")
    shutil.copytree(inner, outer / "nested")
    tree = scan_tree(outer)
    assert names(tree) == {
        "main.py", ".gitmodules", "pkg/data/loader.py", "sub/lib.py", "sub/.gitignore", "nested/lib.py",
        "nested/.gitignore",
    }  # fmt: skip
    assert tree.ignored == ("nested/skip.log", "sub/extra.log")
    assert names(scan_tree(outer / "pkg")) == {"data/loader.py"}
    git(outer, "worktree", "add", str(tmp_path / "tree"))
    tree = scan_tree(tmp_path / "tree")
    assert names(tree) == {"main.py", ".gitmodules", "pkg/data/loader.py", "deleted.py"}
    assert "the submodule sub" in tree.warnings[0]
    write(outer, ".gitignore", "build/\n")
    write(outer, "build/job.py", "")
    assert names(scan_tree(outer / "build")) == {"job.py"}


def test_a_checkout_of_another_user_and_a_hook_s_environment(tmp_path, monkeypatch):
    folder = tmp_path / "repo"
    write(folder, "a.py", "")
    write(folder, "b.log", "")
    write(folder, ".gitignore", "*.log\n")
    git(folder, "init")
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, 12345, 12345)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert names(scan_tree(folder)) == {"a.py", ".gitignore"}


def test_without_git_caches_and_environments_stay_here(tmp_path, monkeypatch):
    folder = tmp_path / "plain"
    write(folder, "train.py", "")
    write(folder, "pkg/__pycache__/train.cpython-311.pyc", "")
    write(folder, "node_modules/x/y.js", "")
    write(folder, "env/pyvenv.cfg", "")
    write(folder, "env/lib/x.py", "")
    (folder / "outputs").mkdir()
    (folder / "link").symlink_to("pkg")
    tree = scan_tree(folder)
    assert names(tree) == {"train.py", "outputs", "link"}
    assert tree.ignored == ("env/", "node_modules/", "pkg/__pycache__/")
    write(folder, ".git/HEAD", "ref: refs/heads/main")
    monkeypatch.setenv("PATH", str(tmp_path))
    warning = scan_tree(folder).warnings[0]
    assert warning == f"the ignore rules of {folder} were not honoured, because git is not installed"


def test_a_broken_repository_is_warned_of(tmp_path):
    folder = tmp_path / "repo"
    write(folder, "train.py", "")
    git(folder, "init")
    git(folder, "add", "train.py")
    (folder / ".git/index").write_bytes(b"garbage")
    tree = scan_tree(folder)
    assert names(tree) == {"train.py"}
    assert "were not honoured, because git failed: " in tree.warnings[0]


def test_untracked_environments_stay_here_too(tmp_path):
    folder = tmp_path / "repo"
    write(folder, "train.py", "")
    write(folder, ".venv/pyvenv.cfg", "")
    write(folder, ".venv/lib/x.py", "")
    git(folder, "init")
    tree = scan_tree(folder)
    assert names(tree) == {"train.py"}
    assert tree.ignored == (".venv/",)


def test_links_that_lead_out_are_left_out_and_reported(tmp_path):
    folder = tmp_path / "code"
    write(folder, "a.txt", "a")
    write(folder, "sub/b.txt", "b")
    (folder / "abs").symlink_to(folder / "sub/b.txt")
    (folder / "sub/abs").symlink_to(folder / "a.txt")
    (folder / "sub/up").symlink_to("../a.txt")
    (folder / "out").symlink_to("/etc/passwd")
    (folder / "out2").symlink_to("../../elsewhere")
    (folder / "broken").symlink_to("missing.txt")
    os.mkfifo(folder / "pipe")
    tree = scan_tree(folder)
    links = {entry.path: entry.content for entry in tree.entries if entry.kind == "l"}
    assert links == {"abs": "sub/b.txt", "sub/abs": "../a.txt", "sub/up": "../a.txt", "broken": "missing.txt"}
    said = "\n".join(tree.warnings)
    assert len(tree.warnings) == 4
    assert "the link out leads out" in said
    assert "the link out2 leads out" in said
    assert "the link broken leads to missing.txt" in said
    assert "pipe is neither" in said


def test_a_large_tree_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setattr("gpu_flows.remote.tree._LARGE_BYTES", 2 << 20)
    write(tmp_path / "code", "weights.pt", bytes(3 << 20))
    write(tmp_path / "code", "train.py", "")
    (warning,) = scan_tree(tmp_path / "code").warnings
    assert "3 MiB; the largest files are weights.pt (3 MiB)" in warning


# Fetches


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
            for pid in sshd.connections():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

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


def test_a_box_that_has_gone_is_given_up(sshd, code, tmp_path):
    sshd.stop()

    async def scenario(box):
        with pytest.raises(SshUnreachable, match="refuses connections"):
            await upload_tree(box, code, "code", patience_s=0.5, timeout_s=600)
        with pytest.raises(SshUnreachable, match="refuses connections"):
            await fetch(box, ["*"], tmp_path / "out", cwd="code", patience_s=0.5, timeout_s=600)

    on_box(sshd, scenario)


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
