from __future__ import annotations

import asyncio
import os
import queue
import signal
import threading
import time

import pytest

from gpu_flows.errors import DeadlineExceeded
from gpu_flows.remote.loop import blocking


async def double(value):
    await asyncio.sleep(0)
    return 2 * value


def test_results_and_errors_come_back():
    async def fail():
        raise ZeroDivisionError

    assert blocking(double(21)) == 42
    with pytest.raises(ZeroDivisionError):
        blocking(fail())


def test_many_threads_share_one_loop():
    async def where():
        return threading.get_ident()

    seen = set()
    threads = [threading.Thread(target=lambda: seen.add(blocking(where()))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 1
    assert threading.get_ident() not in seen


def test_a_deadline_cancels_the_coroutine_and_lets_it_clean_up():
    cleaned = []

    async def endless():
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0.05)
            cleaned.append(True)

    start = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"gave up after 0\.1 s"):
        blocking(endless(), 0.1)
    assert cleaned
    assert time.monotonic() - start < 3


def test_a_timeout_of_the_coroutine_s_own_is_passed_on():
    async def fail():
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        blocking(fail(), 10)


def test_an_interrupt_at_any_moment_leaves_nothing_running():
    """What a signal handler raises: Ctrl-C, Airflow's SIGTERM. It may hit before the coroutine has begun."""

    class Interrupted(BaseException):
        pass

    def interrupt(*_):
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    main = threading.get_ident()
    running = cancelled = 0

    async def endless():
        nonlocal running, cancelled
        running += 1
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled += 1
            raise

    go = queue.SimpleQueue()

    def soon(delay_s):
        go.get()
        time.sleep(delay_s)
        signal.pthread_kill(main, signal.SIGUSR1)

    try:
        for n in range(100):
            thread = threading.Thread(target=soon, args=[n * 5e-6])
            thread.start()
            with pytest.raises(Interrupted):
                go.put(None)
                blocking(endless())
            thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert blocking(double(1)) == 2
    assert running == cancelled


def test_a_call_from_the_loop_itself_is_refused():
    async def nested():
        blocking(double(1))

    with pytest.raises(RuntimeError, match="await the coroutine instead"):
        blocking(nested(), 10)


def test_it_may_be_called_where_another_loop_runs():
    async def outer():
        return blocking(double(2))

    assert asyncio.run(outer()) == 4


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_gets_a_loop_of_its_own():
    """Airflow forks its task runner; the parent's thread does not exist in the child."""
    assert blocking(double(1)) == 2
    child = os.fork()
    if child == 0:
        os._exit(0 if blocking(double(3), 10) == 6 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert blocking(double(1)) == 2
