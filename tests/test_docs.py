"""Every snippet of the README and the docs is run, or at least parsed where running it needs a server."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import PROJECT, Machine, machine

__all__ = ["machine"]

FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NEEDS_A_SERVER = ("airflow", "prefect")
PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def blocks(language: str) -> list[object]:
    found = []
    for page in PAGES:
        for number, (kind, text) in enumerate(FENCE.findall(page.read_text()), 1):
            if kind == language:
                found.append(pytest.param(page, text, id=f"{page.relative_to(PROJECT)}-{number}"))
    return found


@pytest.mark.parametrize(("page", "text"), blocks("python"))
def test_python_runs(machine: Machine, tmp_path: Path, page: Path, text: str) -> None:
    tree = ast.parse(text)
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    if imported & set(NEEDS_A_SERVER):
        return  # run as it stands by the tests of dags_examples
    (tmp_path / "train.py").write_text("open('model.pt', 'w').write('weights')\nprint('trained')\n")
    (tmp_path / "snippet.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "snippet.py"],
        cwd=tmp_path,
        env={**machine.environment, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert machine.boxes() == []


@pytest.mark.parametrize(("page", "text"), blocks("toml"))
def test_toml_is_toml(page: Path, text: str) -> None:
    import tomllib

    tomllib.loads(text)


def test_the_feature_table_is_what_the_adapters_declare() -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("feature_table", PROJECT / "tools" / "feature_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.table() in (PROJECT / "docs" / "clouds" / "README.md").read_text(), "run: make features"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readmes_commands_exist() -> None:
    """The verbs of ``make`` and ``gpu-flows`` that the README shows; the long ones are run by other tests."""
    makefile = (PROJECT / "Makefile").read_text()
    readme = (PROJECT / "README.md").read_text()
    gpu_flows = str(Path(sys.executable).parent / "gpu-flows")
    for line in re.findall(r"^\$ (.*)$", readme, re.MULTILINE):
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), line
        else:
            assert words[0] == "gpu-flows"
            asked = subprocess.run([gpu_flows, words[1], "--help"], capture_output=True, env=dict(os.environ))
            assert asked.returncode == 0, line


def test_the_commands_of_the_cli_page_run_as_they_stand(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('model.pt', 'w').write('weights')\nprint('trained')\n")
    gpu_flows = str(Path(sys.executable).parent / "gpu-flows")
    page = (PROJECT / "docs" / "cli.md").read_text()
    for name, text in re.findall(r"^```toml\n# (\S+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(text)
    lines = re.findall(r"^\$ gpu-flows (.*)$", page, re.MULTILINE)
    assert len(lines) > 8
    for line in lines:
        done = subprocess.run(
            [gpu_flows, *shlex.split(line)],
            cwd=tmp_path,
            env=machine.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, line + "\n" + done.stdout + done.stderr
    assert machine.boxes() == []


def test_the_exit_codes_of_the_cli_page_are_those_of_the_code() -> None:
    from gpu_flows.cli.exits import Exit

    page = (PROJECT / "docs" / "cli.md").read_text()
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)} == {
        int(code) for code in Exit
    }
