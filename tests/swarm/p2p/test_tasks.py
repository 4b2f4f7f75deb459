"""Calls of several peers at once."""

from __future__ import annotations

import asyncio
import time

import pytest

from nesa_node.core.errors import PeerUnreachableError
from nesa_node.swarm.p2p import tasks
from nesa_node.swarm.p2p.tasks import SharedCall, gather_until_first_answer


async def _answer(after_s: float, answer: int | Exception) -> int:
    await asyncio.sleep(after_s)
    if isinstance(answer, Exception):
        raise answer
    return answer


async def test_peers_have_a_moment_once_one_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "LATE_ANSWER_GRACE_S", 0.1)
    gone = PeerUnreachableError("gone")
    calls = [_answer(0, gone), _answer(0.02, 2), _answer(0.05, 3), _answer(60, 4)]
    first, second, third, late = await gather_until_first_answer(calls)
    assert (first, second, third) == (gone, 2, 3)
    assert isinstance(late, PeerUnreachableError)
    assert "0.1 s after the first" in str(late)


async def test_what_is_no_silence_is_raised_at_once() -> None:
    with pytest.raises(ZeroDivisionError):
        await gather_until_first_answer([_answer(60, 1), _answer(0, ZeroDivisionError())])


async def test_callers_that_are_cancelled_do_not_delay_the_calls_of_others() -> None:
    """Each would begin a call of its own after the pause, with the honest one behind them all."""
    ended: list[float] = []

    async def call() -> None:
        await asyncio.sleep(0.2)
        ended.append(time.monotonic())

    shared = SharedCall(call, pause_s=0.1)
    hostile = [asyncio.create_task(shared.run_since(time.monotonic())) for _ in range(20)]
    await asyncio.sleep(0.1)
    honest = asyncio.create_task(shared.run_since(time.monotonic()))

    async def end_one_by_one() -> None:
        for task in hostile:
            task.cancel()
            await asyncio.sleep(0.3)

    ending = asyncio.create_task(end_one_by_one())
    assert await honest
    assert not ending.done()
    assert len(ended) == 2
    ending.cancel()


async def test_a_call_that_fails_fails_for_all_that_wait_and_is_made_again_for_later_ones() -> None:
    calls: list[float] = []

    async def call() -> None:
        calls.append(time.monotonic())
        await asyncio.sleep(0.01)
        if len(calls) == 1:
            raise PeerUnreachableError("gone")

    shared, since = SharedCall(call), time.monotonic()
    waiting = (shared.run_since(since) for _ in range(3))
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, PeerUnreachableError)
    assert len(calls) == 1
    assert await shared.run_since(since)
    assert await shared.run_since(since)
    assert len(calls) == 2


async def test_what_a_caller_found_otherwise_it_does_not_wait_for() -> None:
    found = asyncio.Event()
    shared = SharedCall(lambda: asyncio.sleep(0.01), pause_s=30.0)
    asyncio.get_running_loop().call_later(0.005, found.set)
    async with asyncio.timeout(5):
        assert await shared.run_since(time.monotonic(), unless=found.is_set)
        shared.not_before = time.monotonic()
        assert await shared.run_since(time.monotonic())
    await shared.close()
