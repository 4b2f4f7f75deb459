"""The device's thread, and callers that do not wait to the end."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from nesa_node.server.scheduler.batch import Executor, open_executor


@pytest.mark.parametrize("cancellations", [1, 2, 5])
async def test_cancelled_caller_waits_for_its_job_however_often_it_is_cancelled(
    cancellations: int,
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    ended = False

    def job() -> None:
        nonlocal ended
        begun.set()
        assert go_on.wait(20)
        ended = True

    async with open_executor() as executor:
        caller = asyncio.create_task(executor.run(job))
        assert await asyncio.to_thread(begun.wait, 20)
        for _ in range(cancellations):
            caller.cancel()
            await asyncio.sleep(0.02)
            assert not caller.done()
        assert not executor.is_idle
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert ended
        assert executor.is_idle


async def test_caller_whose_deadline_and_cancellation_meet_waits_for_its_job() -> None:
    go_on = threading.Event()
    left: list[bool] = []

    async def ask() -> None:
        try:
            async with asyncio.timeout(0.02):
                await executor.run(lambda: go_on.wait(20))
        finally:
            left.append(go_on.is_set())

    async with open_executor() as executor:
        caller = asyncio.create_task(ask())
        await asyncio.sleep(0.1)
        caller.cancel()
        await asyncio.sleep(0.05)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert left == [True]


async def test_job_that_has_not_begun_is_dropped_with_its_caller() -> None:
    go_on, ran = threading.Event(), []
    async with open_executor() as executor:
        first = asyncio.create_task(executor.run(lambda: go_on.wait(20)))
        second = asyncio.create_task(executor.run(lambda: ran.append(1)))
        await asyncio.sleep(0.05)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        go_on.set()
        assert await first
    assert ran == []


def test_load_is_the_busy_share_of_the_last_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    def job() -> None:
        now[0] += 30.0

    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now[0])
        executor = Executor(pool)
        assert executor.load == 0.0
        executor.run_inline(job)
        assert executor.load == pytest.approx(0.5)
        now[0] += 30.0
        assert executor.load == pytest.approx(0.25)
        executor.run_inline(job)
        assert executor.load == pytest.approx(0.625)
