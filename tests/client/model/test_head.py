"""Calls of the head that come at once are computed together; each gets its own result or error."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from nesa_node.client.model.head import MAX_BATCH_TOKENS, MAX_SHARED_TOKENS, HeadBatcher


class Gated:
    """Doubles its input; the first call waits until `open` is set. A negative input is an error."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.sizes: list[int] = []

    def __call__(self, hidden_TD: Tensor) -> Tensor:
        self.sizes.append(len(hidden_TD))
        if len(self.sizes) == 1:
            assert self.open.wait(10)
        if bool((hidden_TD < 0).any()):
            raise ValueError(f"negative: {float(hidden_TD.min())}")
        return hidden_TD * 2


def batcher(compute: Callable[[Tensor], Tensor]) -> HeadBatcher:
    def embed_rows(ids_R: Tensor, positions_R: Tensor) -> Tensor:
        return torch.stack([ids_R, positions_R], 1).float()

    return HeadBatcher(compute, embed_rows)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def together(
    compute: Gated, combined: HeadBatcher, inputs: list[Tensor], pool: ThreadPoolExecutor
) -> list[Future[Tensor]]:
    """Let the first input be computed while all the others gather."""
    results = [pool.submit(combined, inputs[0])]
    wait_until(lambda: len(compute.sizes) == 1)
    for number, hidden_TD in enumerate(inputs[1:], 1):
        results.append(pool.submit(combined, hidden_TD))
        wait_until(lambda number=number: len(combined._waiting) == number)  # type: ignore[misc]
    compute.open.set()
    return results


@pytest.fixture
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(32)


def test_those_who_wait_are_computed_together(pool: ThreadPoolExecutor) -> None:
    compute = Gated()
    inputs = [torch.full((1 + n % 3, 4), float(n)) for n in range(20)]
    with pool:
        results = together(compute, batcher(compute), inputs, pool)
        for hidden_TD, result in zip(inputs, results, strict=True):
            assert torch.equal(result.result(10), hidden_TD * 2)
    assert compute.sizes == [1, sum(map(len, inputs)) - 1]


def test_an_error_reaches_only_the_caller_who_is_at_fault(pool: ThreadPoolExecutor) -> None:
    compute = Gated()
    inputs = [torch.full((1, 4), float(n)) for n in (1, 2, -3, 4, -5)]
    with pool:
        results = together(compute, batcher(compute), inputs, pool)
        for hidden_TD, result in zip(inputs, results, strict=True):
            if bool((hidden_TD < 0).any()):
                with pytest.raises(ValueError, match=f"negative: {float(hidden_TD[0, 0])}"):
                    result.result(10)
            else:
                assert torch.equal(result.result(10), hidden_TD * 2)


def test_long_inputs_are_computed_alone_and_groups_are_bounded(pool: ThreadPoolExecutor) -> None:
    compute = Gated()
    combined = batcher(compute)
    size = MAX_SHARED_TOKENS
    with pool:
        results = together(compute, combined, [torch.ones(size, 4)] * 10, pool)
        for result in results:
            assert len(result.result(10)) == size
        assert len(combined(torch.ones(size + 1, 4))) == size + 1
    assert compute.sizes == [size, MAX_BATCH_TOKENS, MAX_BATCH_TOKENS, size, size + 1]


def test_an_interrupted_caller_does_not_stop_the_others(pool: ThreadPoolExecutor) -> None:
    compute = Gated()
    combined = batcher(compute)

    def interrupt() -> None:
        wait_until(lambda: len(combined._waiting) == 1)
        os.kill(os.getpid(), signal.SIGINT)

    with pool:
        first = pool.submit(combined, torch.ones(1, 4))
        wait_until(lambda: len(compute.sizes) == 1)
        interrupting = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            combined(torch.ones(1, 4))
        interrupting.result(10)
        compute.open.set()
        assert torch.equal(first.result(10), torch.full((1, 4), 2.0))
        assert torch.equal(combined(torch.ones(2, 4)), torch.full((2, 4), 2.0))


def test_threads_that_come_again_and_again_all_get_theirs(pool: ThreadPoolExecutor) -> None:
    compute = Gated()
    compute.open.set()
    combined = batcher(compute)

    def work(number: int) -> None:
        for turn in range(200):
            hidden_TD = torch.full((1 + turn % 5, 4), float(1000 * number + turn))
            assert torch.equal(combined(hidden_TD), hidden_TD * 2)

    with pool:
        for done in [pool.submit(work, number) for number in range(16)]:
            done.result(30)


def test_threads_that_take_turns_wait_for_each_other(pool: ThreadPoolExecutor) -> None:
    sizes: list[int] = []

    def compute(hidden_TD: Tensor) -> Tensor:
        sizes.append(len(hidden_TD))
        time.sleep(0.2)
        return hidden_TD * 2

    combined = batcher(compute)
    with pool:
        for number in range(4):
            first = pool.submit(combined, torch.full((1, 4), float(number)))
            time.sleep(0.005)
            second = pool.submit(combined, torch.full((1, 4), -1.0))
            assert torch.equal(first.result(10), torch.full((1, 4), 2.0 * number))
            assert torch.equal(second.result(10), torch.full((1, 4), -2.0))
    # Nobody knows of the other at first.
    assert sizes == [1, 1, 2, 2, 2]


def test_the_first_waits_while_others_keep_coming(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    compute_s = [0.5]

    def compute(hidden_TD: Tensor) -> Tensor:
        sizes.append(len(hidden_TD))
        threading.Event().wait(compute_s[0])
        return hidden_TD * 2

    combined = batcher(compute)
    others: list[Future[Tensor]] = []
    wait = combined._arrived.wait

    def meanwhile(seconds: float) -> bool:
        """One more comes in each pause, and none is waited for who would be the ninth."""
        assert 0 < seconds < 0.5
        assert len(others) < 7
        others.append(pool.submit(combined, torch.full((1, 4), float(len(others)))))
        return wait(10)

    with pool:
        # What computing takes, and how many come, is learnt.
        for call in [pool.submit(combined, torch.zeros(1, 4)) for _ in range(8)]:
            call.result(10)
        monkeypatch.setattr(combined._arrived, "wait", meanwhile)
        compute_s[0] = 0.0
        sizes.clear()
        combined(torch.zeros(1, 4))
        for number, call in enumerate(others):
            assert torch.equal(call.result(10), torch.full((1, 4), 2.0 * number))
    assert sizes == [8]


async def test_threads_and_sessions_of_the_loop_are_computed_together() -> None:
    compute = Gated()
    combined = batcher(compute)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(combined, torch.zeros(1, 4))
        wait_until(lambda: len(compute.sizes) == 1)
        tokens = [asyncio.create_task(combined.choose_next(likes(n), n)) for n in (7, 8)]
        await asyncio.sleep(0)
        second = pool.submit(combined, torch.ones(2, 100))
        wait_until(lambda: len(combined._waiting) == 3)
        compute.open.set()
        assert [(await task).token for task in tokens] == [7, 8]
        assert torch.equal(second.result(10), torch.full((2, 100), 2.0))
        first.result(10)
    assert compute.sizes == [1, 4]


@dataclass
class Ends:
    """Token i follows where value i is the largest; NaN is an error. A reading takes `takes_s`."""

    takes_s: float = 0.0
    sizes: list[int] = field(default_factory=list)

    def head(self, hidden_TD: Tensor) -> Tensor:
        self.sizes.append(len(hidden_TD))
        time.sleep(self.takes_s)
        if bool(hidden_TD.isnan().any()):
            raise ValueError("NaN")
        return hidden_TD.clone()


def likes(token: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor([token]), 100).float()


async def test_those_who_come_together_are_read_for_once() -> None:
    ends = Ends(takes_s=0.02)
    next_tokens = batcher(ends.head)
    for _ in range(4):
        chosen = await asyncio.gather(
            *(next_tokens.choose_next(likes(token), 5 + token) for token in range(20))
        )
        assert [one.token for one in chosen] == list(range(20))
        for token, one in enumerate(chosen):
            assert one.hidden_1D is not None
            assert one.hidden_1D.tolist() == [[token, 5 + token]]
    assert ends.sizes == [20] * 4


async def test_who_comes_first_waits_for_as_many_as_came_before() -> None:
    ends = Ends(takes_s=0.4)  # of which it waits a quarter
    next_tokens = batcher(ends.head)

    async def later(number: int) -> int:
        await asyncio.sleep(0.005 * number)
        return (await next_tokens.choose_next(likes(number), 0)).token

    for _ in range(4):
        assert await asyncio.gather(*map(later, range(4))) == [0, 1, 2, 3]
    # Not each time: on a busy machine the last one may come after a quarter.
    assert 4 in ends.sizes[1:]


async def test_one_session_waits_for_nobody() -> None:
    ends = Ends(takes_s=0.2)
    next_tokens = batcher(ends.head)
    await next_tokens.choose_next(likes(1), 0)
    began = time.monotonic()
    for _ in range(3):
        await next_tokens.choose_next(likes(1), 0)
    assert ends.sizes == [1] * 4
    assert time.monotonic() - began < 3 * 0.2 * 1.2


async def test_an_error_reaches_only_the_session_whose_it_is() -> None:
    next_tokens = batcher(Ends().head)
    bad = torch.full((1, 100), torch.nan)
    calls = [next_tokens.choose_next(hidden_1D, 0) for hidden_1D in (likes(3), bad, likes(4))]
    results: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
    assert (results[0].token, results[2].token) == (3, 4)
    assert isinstance(results[1], ValueError)


@pytest.mark.parametrize("begun", [False, True])
async def test_who_is_cancelled_does_not_hold_up_the_others(begun: bool) -> None:
    ends = Ends(takes_s=0.05)
    next_tokens = batcher(ends.head)
    tasks = [asyncio.create_task(next_tokens.choose_next(likes(token), 0)) for token in range(3)]
    await asyncio.sleep(0.02 if begun else 0)
    tasks[0].cancel()
    chosen = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(chosen[0], asyncio.CancelledError)
    assert [one.token for one in chosen[1:] if not isinstance(one, BaseException)] == [1, 2]
    assert (await next_tokens.choose_next(likes(9), 0)).token == 9


async def test_banned_tokens_and_last_ones() -> None:
    next_tokens = batcher(Ends().head)
    scores = likes(7) + 0.5 * likes(8)
    first, last = await asyncio.gather(
        next_tokens.choose_next(scores, 3, frozenset({7})), next_tokens.choose_next(scores, None)
    )
    assert (first.token, last.token) == (8, 7)
    assert first.hidden_1D is not None
    assert last.hidden_1D is None


async def test_the_logits_of_one_reading_are_bounded() -> None:
    ends = Ends()
    next_tokens = batcher(ends.head)
    count = 2 * MAX_BATCH_TOKENS + 1
    chosen = await asyncio.gather(
        *(next_tokens.choose_next(likes(number % 100), 0) for number in range(count))
    )
    assert [one.token for one in chosen] == [number % 100 for number in range(count)]
    assert max(ends.sizes) == MAX_BATCH_TOKENS


async def test_logits_at_once_wait_for_no_other_thread() -> None:
    """The event loop's only thread asks for them while it is to run the batch that waits."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    combined = batcher(lambda hidden_TD: hidden_TD * 2)
    has_begun = asyncio.Event()

    def compute_once_a_call_waits() -> Tensor:
        loop.call_soon_threadsafe(has_begun.set)
        wait_until(lambda: len(combined._waiting) == 1)
        return combined.compute(torch.ones(1, 2))

    try:
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            computing = group.create_task(asyncio.to_thread(compute_once_a_call_waits))
            await has_begun.wait()
            choosing = group.create_task(combined.choose_next(torch.tensor([[1.0, 3.0]]), None))
    except TimeoutError:
        combined._run_batches(0)  # else the thread, and so the test, would not end
        raise
    assert computing.result().tolist() == [[2.0, 2.0]]
    assert choosing.result().token == 1
