"""What a person sees: colours and a spinner on a terminal, none elsewhere, no line broken where it should not be."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpu_flows.cli.output import Column, Format, Output, length, usd
from gpu_flows.cli.screen import Screen
from gpu_flows.progress import Progress
from tests.cli.conftest import Cli

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_a_terminal(*words: str, columns: int = 80, **environment: str) -> tuple[int, str]:
    """Run the command line on a terminal; return its exit code and everything that it wrote there."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", "from gpu_flows.cli import main; main()", *words],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "TERM": "xterm-256color",
            "COLUMNS": str(columns),
            **environment,
        },
    )
    os.close(slave)
    seen = b""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if select.select([master], [], [], 0.2)[0]:
            try:
                chunk = os.read(master, 65536)
            except OSError:  # Linux's way to say that the other end is closed
                break
            seen += chunk
        elif process.poll() is not None:
            break
    os.close(master)
    return process.wait(10), seen.decode()


def test_a_terminal_has_colours_and_a_spinner() -> None:
    code, seen = on_a_terminal("provision", "--gpus", "cpu", "--owner", "seen", "--max-duration", "10m")
    assert code == 0, seen
    assert "\x1b[32m" in seen
    assert "renting 1 x cpu on local" in seen
    assert "⠋" in seen
    code, seen = on_a_terminal("down", "--owner", "seen", NO_COLOR="1")
    assert code == 0, seen
    assert "giving the boxes back" in seen
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", seen), "NO_COLOR was not respected"


@pytest.mark.parametrize("columns", [80, 120])
def test_tables_fit_the_terminal(columns: int) -> None:
    code, seen = on_a_terminal("gpus", columns=columns)
    assert code == 0
    lines = _ESCAPE.sub("", seen).splitlines()
    assert max(map(len, lines)) <= columns
    assert any(line.startswith("RTX-PRO-6000") for line in lines)
    assert any("digitalocean" in line for line in lines)


def test_elsewhere_there_are_no_escapes_and_no_spinner(cli: Cli) -> None:
    for words in (["gpus"], ["resolve", "cpu"], ["ps"], ["run", "--help"], ["resolve", "H10"]):
        said = cli(*words)
        assert "\x1b" not in said.out + said.err
        assert "⠋" not in said.err


def test_an_upload_and_a_wait_are_shown_and_taken_down() -> None:
    import io

    from rich.console import Console

    screen = Screen()
    wrote = io.StringIO()
    screen._terminal = True
    screen._console = Console(file=wrote, force_terminal=True, width=80, legacy_windows=False)
    screen.waiting("uploading the code")
    screen.uploaded(1 << 20, 4 << 20)
    screen._live.refresh()
    screen(Progress("launch", "code.uploaded", "x" * 100))
    screen.log_line("rank 0", "epoch 1 [bold]not markup[/bold]")
    screen.uploaded(4 << 20, 4 << 20)
    screen.stop()
    text = _ESCAPE.sub("", wrote.getvalue()).replace("\r", "\n")
    assert "uploading the code" in text
    assert "1.0/4.2 MB" in text
    assert "rank 0     │ epoch 1 [bold]not markup[/bold]" in text
    # What does not fit goes on below its own column.
    assert re.search(r"^launch     x{69}\s*\n {11}x{31}\s*$", text, re.MULTILINE)


def test_where_nobody_looks_lines_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen(Progress("provision", "box.ready", "y" * 300))
    screen(Progress("train", "phase.began", ""))
    assert capsys.readouterr().err == f"provision  {'y' * 300}\n"


def test_plain_tables_have_one_line_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(Format.PLAIN)
    output.table({}, [Column("a"), Column("b")], [("1\n2", "x\ty")])
    assert capsys.readouterr().out == "a\tb\n1 2\tx y\n"


def test_lengths_and_dollars_read_well() -> None:
    from datetime import timedelta

    spans = {
        0: "0 s",
        59: "59 s",
        61: "1 min",
        3600: "1 h",
        3661: "1 h 1 min",
        90000: "1 d 1 h",
        86400: "1 d",
        -5: "0 s",
    }
    assert {seconds: length(timedelta(seconds=seconds)) for seconds in spans} == spans
    assert (usd(None), usd(1.239)) == ("?", "1.24")
