from __future__ import annotations

import _thread
import contextvars
import signal
import threading

import pytest

from gpu_flows.leases.parallel import MAX_CALLS_AT_ONCE, in_parallel


def test_every_outcome_is_kept_in_order() -> None:
    outcomes = in_parallel([lambda: 1, lambda: 1 // 0, lambda: 3])
    assert outcomes[0] == 1
    assert isinstance(outcomes[1], ZeroDivisionError)
    assert outcomes[2] == 3
    assert in_parallel([]) == []
    assert isinstance(in_parallel([lambda: 1 // 0])[0], ZeroDivisionError)


def test_no_more_than_the_limit_run_at_once() -> None:
    lock, running, most = threading.Lock(), 0, 0

    def call() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.01)
        with lock:
            running -= 1

    in_parallel([call] * 100)
    assert 1 < most <= MAX_CALLS_AT_ONCE


def test_context_variables_are_seen_inside() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("seen")
    assert in_parallel([variable.get, variable.get]) == ["seen", "seen"]


def test_what_is_no_exception_of_a_call_is_raised() -> None:
    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        in_parallel([leave, lambda: None])


def test_an_interruption_waits_for_calls_that_must_end() -> None:
    done: list[str] = []

    def call() -> None:
        _thread.interrupt_main()
        threading.Event().wait(0.2)
        done.append("recorded")

    with pytest.raises(KeyboardInterrupt):
        in_parallel([call, lambda: None])
    assert done == ["recorded"]


def test_an_interruption_leaves_calls_that_only_wait() -> None:
    go_on, main_thread = threading.Event(), threading.get_ident()

    def call() -> None:
        # A real signal: only that wakes a thread which waits.
        signal.pthread_kill(main_thread, signal.SIGINT)
        go_on.wait(30)

    with pytest.raises(KeyboardInterrupt):
        in_parallel([call, lambda: None], interruptible=True)
    go_on.set()
