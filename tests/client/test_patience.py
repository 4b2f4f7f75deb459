"""How often and how long a session asks, with a clock that the test moves."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from nesa_node.client.line import Line
from nesa_node.client.patience import HOLD_S, LONGEST_PAUSE_S, LOOKS, Patience
from nesa_node.core.errors import BusyError, MissingBlocksError, PeerUnreachableError

BUSY = BusyError("full", 0.5)
GONE = PeerUnreachableError("gone")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def waits(patience: Patience, clock: Clock, error: Exception) -> list[float]:
    """The pauses until it gives up."""
    pauses = []
    while (pause_s := patience.pause_s(error, others_left=False)) is not None:
        pauses.append(pause_s)
        clock.now += pause_s
    return pauses


def make(clock: Clock, **options: Any) -> Patience:
    timeouts: dict[str, Any] = {"queue_timeout_s": 300.0, "recovery_timeout_s": 20.0, **options}
    return Patience(rng=random.Random(1), clock=clock, **timeouts)


def test_failures_last_for_the_recovery_time_and_busy_nodes_for_the_queue_time() -> None:
    for error, longest_s in ((GONE, 20), (BUSY, 300)):
        clock = Clock()
        pauses = waits(make(clock), clock, error)
        assert sum(pauses) == pytest.approx(longest_s), "as long as the error says, never less"
        assert len(set(pauses)) == len(pauses), "jitter"
        assert max(pauses) <= 1.5 * LONGEST_PAUSE_S
    assert min(pauses[:-1]) >= BUSY.retry_after_s / 2


def test_being_told_to_wait_is_not_failing() -> None:
    clock = Clock()
    patience = make(clock)
    for _ in range(10):
        clock.now += 15
        assert patience.pause_s(BUSY, others_left=False) is not None
        clock.now += 15
        assert patience.pause_s(GONE, others_left=False) is not None
    clock.now += 30
    assert patience.pause_s(GONE, others_left=False) is None
    assert patience.pause_s(BUSY, others_left=False) is None


def test_other_nodes_are_tried_at_once() -> None:
    clock = Clock()
    assert make(clock).pause_s(BUSY, others_left=True) == 0.0


def test_nodes_are_let_go_only_after_others_were_busy_for_a_while() -> None:
    clock = Clock()
    patience = make(clock)
    patience.pause_s(GONE, others_left=False)
    clock.now += 2 * HOLD_S
    patience.pause_s(BUSY, others_left=False)
    assert not patience.must_let_go
    clock.now += 2 * HOLD_S
    assert patience.must_let_go


async def test_the_line_is_kept_and_moves_on_when_somebody_leaves() -> None:
    line, served = Line(at_once=1), []
    async with line.turn(1.0):

        async def come(number: int) -> None:
            async with line.turn(5.0):
                served.append(number)

        tasks = [asyncio.create_task(come(number)) for number in range(5)]
        await asyncio.sleep(0)
        with pytest.raises(BusyError, match="others of this process"):
            async with line.turn(0.01):
                pass
        line.left()
        async with asyncio.timeout(1.0):
            await line.pause(60.0)
    await asyncio.gather(*tasks)
    assert served == list(range(5))


def test_missing_blocks_that_nobody_is_joining_with_are_refused_after_a_few_looks() -> None:
    clock = Clock()
    patience = make(clock)
    missing = MissingBlocksError([(0, 4)], "nobody")

    def pause_s(*, hopeless: bool) -> float | None:
        return patience.pause_s(missing, others_left=False, hopeless=hopeless)

    assert pause_s(hopeless=True) is not None
    # One member of the DHT may not have answered: what the next look finds counts.
    assert pause_s(hopeless=False) is not None
    looked = [pause_s(hopeless=True) for _ in range(LOOKS)]
    assert looked[-1] is None
    assert all(pause is not None and pause < 1 for pause in looked[:-1])
