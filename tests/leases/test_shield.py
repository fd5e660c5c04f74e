from __future__ import annotations

import _thread
import contextvars
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpu_flows.leases.shield import shielded


def test_it_returns_and_raises_what_the_call_does() -> None:
    assert shielded(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        shielded(lambda: 1 // 0)


def test_context_variables_are_seen_inside() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("seen")
    assert shielded(variable.get) == "seen"


def test_an_interruption_waits_for_the_end_and_goes_on() -> None:
    done: list[str] = []

    def call() -> None:
        _thread.interrupt_main()
        threading.Event().wait(0.2)
        _thread.interrupt_main()
        done.append("recorded")

    with pytest.raises(KeyboardInterrupt):
        shielded(call)
    assert done == ["recorded"]


def test_a_failure_of_an_interrupted_call_is_chained() -> None:
    def call() -> None:
        _thread.interrupt_main()
        threading.Event().wait(0.1)
        raise ValueError("the create failed")

    with pytest.raises(KeyboardInterrupt) as caught:
        shielded(call)
    assert isinstance(caught.value.__cause__, ValueError)


ROUNDS = """
import random, signal, sys, time
from gpu_flows.leases.shield import shielded

class Stop(BaseException):
    pass

signals_left = 0

def stop(*_):
    global signals_left
    signals_left -= 1
    if signals_left >= 0:
        raise Stop

signal.signal(signal.SIGALRM, stop)
random.seed(int(sys.argv[1]))
interrupted = 0
for number in range(1500):
    begun, ended = [], []

    def call():
        begun.append(1)
        time.sleep(0.0005)
        ended.append(1)

    # Three levels for two signals: the harness itself must not fall to one.
    try:
        try:
            try:
                signals_left = random.randint(1, 2)
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 0.0012), random.uniform(1e-5, 0.0004))
                shielded(call)
            except Stop:
                interrupted += 1
            signals_left = 0
        except Stop:
            pass
        signals_left = 0
    except Stop:
        pass
    signals_left = 0
    torn = len(begun) != len(ended)
    signal.setitimer(signal.ITIMER_REAL, 0)
    if torn:
        sys.exit(f"round {number}: the call was torn in two")
print(interrupted)
"""


def test_signals_at_any_moment_never_tear_a_call_in_two() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS, "7"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 300, "the signals hardly ever hit"
