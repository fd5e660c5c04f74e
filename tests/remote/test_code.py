from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from gpu_flows.errors import BadRequest
from gpu_flows.remote.files import scan_tree, upload_tree
from tests.remote.boxes import on_box, write


def git(folder, *arguments):
    subprocess.run(
        ["git", "-c", "user.name=n", "-c", "user.email=e@x", *arguments],
        cwd=folder,
        check=True,
        capture_output=True,
    )


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
