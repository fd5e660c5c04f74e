"""The command line as a user has it: a home of its own, `main` in this process, or a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpu_flows.cli import main
from tests.cli import acme


@dataclass(frozen=True)
class Said:
    """What a call said, and the exit code that it ended with."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Return the document on stdout, which has to be exactly one."""
        return json.loads(self.out)


Cli = Callable[..., Said]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give every test a home and a working folder of its own; no box of it may be left."""
    ours = ("GPU_FLOWS_", "NO_COLOR", "FORCE_COLOR")
    theirs = ("_API_KEY", "_TOKEN", "_ACCESS_KEY_ID", "_SECRET_ACCESS_KEY", "_PROFILE")
    for name in [name for name in os.environ if name.startswith(ours) or name.endswith(theirs)]:
        monkeypatch.delenv(name)
    folder = tmp_path / "home"
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("GPU_FLOWS_HOME", str(folder / "state"))
    monkeypatch.setenv("GPU_FLOWS_CONFIG_HOME", str(folder / "config"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    yield folder
    boxes = folder / "state" / "local" / "boxes"
    left = sorted(boxes.iterdir()) if boxes.exists() else []
    for box in left:
        from gpu_flows.clouds.local.registry import Registry

        Registry(boxes.parent).end(box.name)
    assert not left, "boxes were left"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Return a function that calls the command line in this process."""

    def call(*words: str) -> Said:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(words)
        said = capsys.readouterr()
        code = ended.value.code
        return Said(code if isinstance(code, int) else 0, said.out, said.err)

    return call


@pytest.fixture
def market(monkeypatch: pytest.MonkeyPatch) -> acme.Market:
    """Return an invented cloud, ``acme``, that is for sale in this process."""
    return acme.open_market(monkeypatch)


class Program:
    """The command line in a process of its own.

    Args:
        words: The words behind the program's name.
    """

    def __init__(self, *words: str, before: str = "") -> None:
        code = f"{before}\nfrom gpu_flows.cli import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        self.heard: list[str] = []
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.put(line)
        self._lines.put("")

    def wait_for(self, text: str, timeout_s: float = 30) -> str:
        """Return the first line on stderr that holds a text, from here on."""
        until = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Empty):
            while line := self._lines.get(timeout=max(0.0, until - time.monotonic())):
                self.heard.append(line)
                if text in line:
                    return line
        raise AssertionError(f"{text!r} was not said: {''.join(self.heard)}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def end(self, timeout_s: float = 30) -> Said:
        """Wait for its end."""
        assert self.process.stdout is not None
        code = self.process.wait(timeout_s)
        out = self.process.stdout.read()
        while line := self._lines.get(timeout=timeout_s):
            self.heard.append(line)
        return Said(code, out, "".join(self.heard))


@pytest.fixture
def program() -> Iterator[Callable[..., Program]]:
    """Return a function that starts the command line in a process of its own, killed at the end if need be."""
    started: list[Program] = []

    def start(*words: str, before: str = "") -> Program:
        started.append(Program(*words, before=before))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
        each.process.wait()
