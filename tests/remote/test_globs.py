from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_flows.remote.globs import resolve_pattern

CWD, HOME = "/srv/job/code", "/home/u"


@pytest.mark.parametrize(
    ("text", "base", "path", "start"),
    [
        ("runs/**", CWD, "runs/**", f"{CWD}/runs"),
        ("runs/a*/b", CWD, "runs/a*/b", f"{CWD}/runs"),
        ("*.json", CWD, "*.json", CWD),
        (".", CWD, "", CWD),
        ("./runs//x", CWD, "runs/x", f"{CWD}/runs/x"),
        ("a/../b", CWD, "b", f"{CWD}/b"),
        ("~/ckpt/*", HOME, "ckpt/*", f"{HOME}/ckpt"),
        ("~", HOME, "", HOME),
        (f"{HOME}/x", HOME, "x", f"{HOME}/x"),
        (f"{CWD}/x", CWD, "x", f"{CWD}/x"),
        ("~other/x", CWD, "~other/x", f"{CWD}/~other/x"),
    ],
)
def test_where_a_pattern_lies(text, base, path, start):
    pattern = resolve_pattern(text, cwd=CWD, home=HOME)
    assert (pattern.base, pattern.path, pattern.start) == (base, path, start)


@pytest.mark.parametrize(
    "text",
    ["..", "../x", "a/../../x", "~/..", "~/../other/x", "/etc/passwd", "/", "/home/user2/x", "/home/u/../x"],
)
def test_u07_what_leads_outside(text):
    assert resolve_pattern(text, cwd=CWD, home=HOME) is None


def test_a_name_with_brackets_names_itself():
    pattern = resolve_pattern("ckpt[1]/last.pt", cwd=CWD, home=HOME)
    assert pattern.matches("ckpt[1]/last.pt")
    assert pattern.matches("ckpt1/last.pt")
    assert not pattern.matches("ckpt2/last.pt")


parts = st.sampled_from(["a", "b", "ab", ".h", "a.b"])
glob_parts = st.sampled_from(["a", "b", "ab", "*", "**", "a*", "?b", "[ab]", "[!a]", ".*", "*.b"])


@settings(deadline=None, max_examples=100)
@given(
    files=st.sets(st.lists(parts, min_size=1, max_size=4).map("/".join), min_size=1, max_size=8),
    glob=st.lists(glob_parts, min_size=1, max_size=4).map("/".join),
)
def test_matches_are_those_of_pathlib_with_all_below(files, glob):
    files = {name for name in files if not any(other.startswith(f"{name}/") for other in files)}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in files:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        hits = {path.relative_to(root).as_posix() for path in root.glob(glob)}
    expected = {
        name for name in files if any(hit == "." or name == hit or name.startswith(f"{hit}/") for hit in hits)
    }
    pattern = resolve_pattern(glob, cwd=CWD, home=HOME)
    assert {name for name in files if pattern.matches(name)} == expected
