"""How often and how long a session asks, with a clock that the test moves."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from nesa_node.client.recovery.retry import (
    MAX_HOPELESS_ATTEMPTS,
    MAX_RETRY_PAUSE_S,
    PARTIAL_CHAIN_HOLD_S,
    OpenLimiter,
    RetryPolicy,
)
from nesa_node.core.errors import BusyError, MissingBlocksError, PeerUnreachableError

BUSY = BusyError("full", 0.5)
GONE = PeerUnreachableError("gone")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def waits(patience: RetryPolicy, clock: Clock, error: Exception) -> list[float]:
    """The pauses until it gives up."""
    pauses = []
    while (pause_s := patience.next_pause_s(error, has_alternatives=False)) is not None:
        pauses.append(pause_s)
        clock.now += pause_s
    return pauses


def make(clock: Clock, **options: Any) -> RetryPolicy:
    timeouts: dict[str, Any] = {"queue_timeout_s": 300.0, "recovery_timeout_s": 20.0, **options}
    return RetryPolicy(rng=random.Random(1), clock=clock, **timeouts)


def test_failures_last_for_the_recovery_time_and_busy_nodes_for_the_queue_time() -> None:
    for error, longest_s in ((GONE, 20), (BUSY, 300)):
        clock = Clock()
        pauses = waits(make(clock), clock, error)
        assert sum(pauses) == pytest.approx(longest_s), "as long as the error says, never less"
        assert len(set(pauses)) == len(pauses), "jitter"
        assert max(pauses) <= 1.5 * MAX_RETRY_PAUSE_S
    assert min(pauses[:-1]) >= BUSY.retry_after_s / 2


def test_being_told_to_wait_is_not_failing() -> None:
    clock = Clock()
    patience = make(clock)
    for _ in range(10):
        clock.now += 15
        assert patience.next_pause_s(BUSY, has_alternatives=False) is not None
        clock.now += 15
        assert patience.next_pause_s(GONE, has_alternatives=False) is not None
    clock.now += 30
    assert patience.next_pause_s(GONE, has_alternatives=False) is None
    assert patience.next_pause_s(BUSY, has_alternatives=False) is None


def test_other_nodes_are_tried_at_once() -> None:
    clock = Clock()
    assert make(clock).next_pause_s(BUSY, has_alternatives=True) == 0.0


def test_nodes_are_let_go_only_after_others_were_busy_for_a_while() -> None:
    clock = Clock()
    patience = make(clock)
    patience.next_pause_s(GONE, has_alternatives=False)
    clock.now += 2 * PARTIAL_CHAIN_HOLD_S
    patience.next_pause_s(BUSY, has_alternatives=False)
    assert not patience.must_release_nodes
    clock.now += 2 * PARTIAL_CHAIN_HOLD_S
    assert patience.must_release_nodes


async def test_the_line_is_kept_and_moves_on_when_somebody_leaves() -> None:
    line, served = OpenLimiter(max_concurrent=1), []
    async with line.slot(1.0):

        async def come(number: int) -> None:
            async with line.slot(5.0):
                served.append(number)

        tasks = [asyncio.create_task(come(number)) for number in range(5)]
        await asyncio.sleep(0)
        with pytest.raises(BusyError, match="other sessions of this process"):
            async with line.slot(0.01):
                pass
        line.notify_released()
        async with asyncio.timeout(1.0):
            await line.wait_for_release(60.0)
    await asyncio.gather(*tasks)
    assert served == list(range(5))


def test_missing_blocks_that_nobody_is_joining_with_are_refused_after_a_few_looks() -> None:
    clock = Clock()
    patience = make(clock)
    missing = MissingBlocksError([(0, 4)], "nobody")

    def pause_s(*, hopeless: bool) -> float | None:
        return patience.next_pause_s(missing, has_alternatives=False, hopeless=hopeless)

    assert pause_s(hopeless=True) is not None
    # One member of the DHT may not have answered: what the next look finds counts.
    assert pause_s(hopeless=False) is not None
    looked = [pause_s(hopeless=True) for _ in range(MAX_HOPELESS_ATTEMPTS)]
    assert looked[-1] is None
    assert all(pause is not None and pause < 1 for pause in looked[:-1])
