"""The background loop of synchronous callers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from nesa_node.client.model.loop_thread import LoopThread


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread("test-loop")
    yield loop
    loop.close()
    assert "test-loop" not in {thread.name for thread in threading.enumerate()}


async def double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


def test_coroutines_run_in_one_thread_that_starts_with_the_first(loop: LoopThread) -> None:
    assert "test-loop" not in {thread.name for thread in threading.enumerate()}
    assert loop.run(double(21)) == 42

    async def name() -> str:
        return threading.current_thread().name

    assert loop.run(name()) == loop.run(name()) == "test-loop"


def test_errors_reach_the_caller(loop: LoopThread) -> None:
    async def fail() -> None:
        raise LookupError("lost")

    with pytest.raises(LookupError, match="lost"):
        loop.run(fail())


def test_a_context_is_entered_and_left_by_one_task(loop: LoopThread) -> None:
    tasks = []

    @asynccontextmanager
    async def context() -> AsyncIterator[str]:
        async with asyncio.TaskGroup():
            tasks.append(asyncio.current_task())
            yield "value"
            tasks.append(asyncio.current_task())

    held = loop.hold(context())
    assert held.value == "value"
    held.release()
    held.release()
    assert len(tasks) == 2
    assert tasks[0] is tasks[1]


def test_errors_of_entering_reach_the_caller_those_of_leaving_do_not(loop: LoopThread) -> None:
    @asynccontextmanager
    async def context(fail_at: str) -> AsyncIterator[None]:
        if fail_at == "enter":
            raise LookupError(fail_at)
        yield
        raise LookupError(fail_at)

    with pytest.raises(LookupError, match="enter"):
        loop.hold(context("enter"))
    loop.hold(context("leave")).release()


def test_close_leaves_sessions_together_and_then_what_they_need(loop: LoopThread) -> None:
    left = []
    together = asyncio.Barrier(3)

    @asynccontextmanager
    async def session() -> AsyncIterator[None]:
        yield
        await together.wait()
        left.append("session")

    @asynccontextmanager
    async def connection() -> AsyncIterator[None]:
        yield
        left.append("connection")

    first = loop.hold(session())
    held = loop.hold(connection(), release_last=True)
    for _ in range(2):
        loop.hold(session())
    loop.close()
    assert left == [*["session"] * 3, "connection"]
    first.release()
    held.release()


def test_nothing_runs_after_close(loop: LoopThread) -> None:
    loop.run(double(1))
    loop.close()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.run(double(1))


def test_a_synchronous_call_inside_the_loop_is_refused(loop: LoopThread) -> None:
    async def nested() -> None:
        loop.run(double(1))

    with pytest.raises(RuntimeError, match="inside"):
        loop.run(nested())


def test_close_ends_waits_of_other_threads(loop: LoopThread) -> None:
    outcome = []

    def wait() -> None:
        try:
            loop.run(asyncio.sleep(60))
        except BaseException as error:
            outcome.append(type(error).__name__)

    thread = threading.Thread(target=wait)
    thread.start()
    while not loop._loop or len(asyncio.all_tasks(loop._loop)) < 2:
        time.sleep(0.01)
    loop.close()
    thread.join(5)
    assert outcome == ["RuntimeError"]


def test_errors_of_time_reach_the_caller_too(loop: LoopThread) -> None:
    async def late() -> None:
        raise TimeoutError("late")

    with pytest.raises(TimeoutError, match="late"):
        loop.run(late())


@pytest.mark.parametrize("attempt", range(20))
def test_an_interrupt_cancels_what_runs(loop: LoopThread, attempt: int) -> None:
    events = []
    running = threading.Event()

    async def work() -> None:
        running.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            events.append("cancelled")
            raise

    def interrupt() -> None:
        running.wait(10)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        loop.run(work())
    thread.join()
    loop.run(double(1))
    assert events == ["cancelled"]


def test_a_program_that_forgets_to_close_still_ends_and_leaves_its_contexts() -> None:
    program = """
import asyncio, contextlib, weakref
from nesa_node.client.model.loop_thread import LoopThread

@contextlib.asynccontextmanager
async def context():
    yield
    await asyncio.sleep(0.01)
    print("left")

class Owner:
    pass

owner, loop = Owner(), LoopThread("forgotten")
weakref.finalize(owner, loop.close)
loop.hold(context())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip() == "left"
    assert done.stderr == ""
