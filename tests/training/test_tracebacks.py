from __future__ import annotations

import subprocess
import sys
import textwrap

from hypothesis import given
from hypothesis import strategies as st

from gpu_flows.training.tracebacks import read_log_end


def failing(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode
    return done.stderr


def test_chained_tracebacks_are_kept_together() -> None:
    log = failing(
        """
        def read():
            try:
                {}["x"]
            except KeyError as error:
                raise ValueError("no x") from error
        try:
            read()
        except ValueError:
            1 / 0
        """
    )
    end = read_log_end("Traceback (most recent call last):\n  old\nOldError: handled long ago\nnext\n" + log)
    assert end.exception == "ZeroDivisionError: division by zero"
    assert end.traceback == log.strip()


def test_progress_bars_and_colours_do_not_hide_it() -> None:
    log = "10%\r20%\r\x1b[31m" + failing("raise SystemError('x')").replace("\n", "\x1b[0m\n") + "100%\r"
    end = read_log_end(log)
    assert end.exception == "SystemError: x"
    assert "\x1b" not in end.traceback


def test_an_exception_group_is_a_traceback() -> None:
    end = read_log_end(failing("raise ExceptionGroup('several', [ValueError('a'), KeyError('b')])"))
    assert end.exception == "ExceptionGroup: several (2 sub-exceptions)"
    assert "KeyError: 'b'" in end.traceback


def test_the_place_is_the_users_own_line() -> None:
    end = read_log_end(
        "Traceback (most recent call last):\n"
        '  File "/root/job/train.py", line 4, in step\n    loss(x)\n'
        '  File "/opt/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 9, in loss\n    raise\n'
        "RuntimeError: shapes\nmore of it\n"
    )
    assert (end.place, end.exception) == ("train.py:4", "RuntimeError: shapes")


def test_a_long_traceback_is_shortened_in_the_middle() -> None:
    frames = "".join(f'  File "train.py", line {n}, in f\n    f()\n' for n in range(500))
    end = read_log_end(f"Traceback (most recent call last):\n{frames}RecursionError: too deep\n")
    assert end.traceback.count("\n") < 100
    assert "lines ..." in end.traceback
    assert end.traceback.endswith("RecursionError: too deep")


@given(st.text())
def test_any_text_can_be_read(text: str) -> None:
    read_log_end(text)
    read_log_end("Traceback (most recent call last):\n" + text)
