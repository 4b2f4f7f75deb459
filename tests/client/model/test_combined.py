"""Threads that come at once are served together, and each gets its own result or error."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

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
        results = together(compute, HeadBatcher(compute), inputs, pool)
        for hidden_TD, result in zip(inputs, results, strict=True):
            assert torch.equal(result.result(10), hidden_TD * 2)
    assert compute.sizes == [1, sum(map(len, inputs)) - 1]


def test_an_error_reaches_only_the_caller_who_is_at_fault(pool: ThreadPoolExecutor) -> None:
    compute = Gated()
    inputs = [torch.full((1, 4), float(n)) for n in (1, 2, -3, 4, -5)]
    with pool:
        results = together(compute, HeadBatcher(compute), inputs, pool)
        for hidden_TD, result in zip(inputs, results, strict=True):
            if bool((hidden_TD < 0).any()):
                with pytest.raises(ValueError, match=f"negative: {float(hidden_TD[0, 0])}"):
                    result.result(10)
            else:
                assert torch.equal(result.result(10), hidden_TD * 2)


def test_long_inputs_are_computed_alone_and_groups_are_bounded(pool: ThreadPoolExecutor) -> None:
    compute = Gated()
    combined = HeadBatcher(compute)
    size = MAX_SHARED_TOKENS
    with pool:
        results = together(compute, combined, [torch.ones(size, 4)] * 10, pool)
        for result in results:
            assert len(result.result(10)) == size
        assert len(combined(torch.ones(size + 1, 4))) == size + 1
    assert compute.sizes == [size, MAX_BATCH_TOKENS, MAX_BATCH_TOKENS, size, size + 1]


def test_an_interrupted_caller_does_not_stop_the_others(pool: ThreadPoolExecutor) -> None:
    compute = Gated()
    combined = HeadBatcher(compute)

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
    combined = HeadBatcher(compute)

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

    combined = HeadBatcher(compute)
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

    combined = HeadBatcher(compute)
    others: list[Future[Tensor]] = []

    def meanwhile(seconds: float) -> None:
        """One more comes in each pause, and none is waited for who would be the ninth."""
        assert 0 < seconds < 0.5
        assert len(others) < 7
        others.append(pool.submit(combined, torch.full((1, 4), float(len(others)))))
        wait_until(lambda: len(combined._waiting) == len(others))

    with pool:
        # What computing takes, and how many come, is learnt.
        for call in [pool.submit(combined, torch.zeros(1, 4)) for _ in range(8)]:
            call.result(10)
        clock = SimpleNamespace(sleep=meanwhile, monotonic=time.monotonic)
        monkeypatch.setattr("nesa_node.client.model.head.time", clock)
        compute_s[0] = 0.0
        sizes.clear()
        combined(torch.zeros(1, 4))
        for number, call in enumerate(others):
            assert torch.equal(call.result(10), torch.full((1, 4), 2.0 * number))
    assert sizes == [8]
