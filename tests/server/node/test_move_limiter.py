"""Which wishes are granted. The daemon that carries them out: `tests/faults/test_moving.py`."""

from __future__ import annotations

import asyncio

import pytest

from nesa_node.core.ids import Span
from nesa_node.server.node.move_limiter import HOUR_S, MoveLimiter, MoveState

SPAN, OTHER = Span(0, 3), Span(3, 6)


class _Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def _moves(clock: _Clock, *, per_hour: int = 2, pause_s: float = 60.0) -> MoveLimiter:
    return MoveLimiter(per_hour=per_hour, pause_s=pause_s, clock=clock)


async def _move(moves: MoveLimiter, clock: _Clock, seconds: float) -> None:
    wish = moves.request_move(SPAN, "test")
    assert await moves.next_request() is wish
    moves.start(wish)
    clock.now += seconds
    moves.settle(wish, "moved")


async def test_pinned_node_refuses_at_once() -> None:
    moves = MoveLimiter(per_hour=4, pause_s=0, pinned=True)
    assert await moves.request_move(SPAN, "test").wait() == "pinned"
    assert moves.refusal == "pinned"


async def test_pause_begins_where_a_move_ends() -> None:
    clock = _Clock()
    moves = _moves(clock)
    await _move(moves, clock, 100.0)
    clock.now += 59.0
    assert moves.request_move(SPAN, "test").outcome == "too_soon"
    clock.now += 1.0
    assert moves.request_move(SPAN, "test").outcome is None


async def test_no_more_moves_begin_in_an_hour_than_allowed() -> None:
    clock = _Clock()
    moves = _moves(clock)
    began = clock.now
    for _ in range(2):
        await _move(moves, clock, 10.0)
        clock.now += 300.0
    assert moves.request_move(SPAN, "test").outcome == "too_many"
    clock.now = began + HOUR_S - 1
    assert moves.refusal == "too_many"
    clock.now = began + HOUR_S
    await _move(moves, clock, 10.0)
    clock.now += 60.0
    assert moves.refusal == "too_many", "the second and third are within an hour"


async def test_nothing_is_granted_where_no_move_is_allowed() -> None:
    assert _moves(_Clock(), per_hour=0).request_move(SPAN, "test").outcome == "too_many"


async def test_newest_wish_wins() -> None:
    moves = _moves(_Clock())
    first, second = moves.request_move(SPAN, "first"), moves.request_move(OTHER, "second")
    assert await first.wait() == "superseded"
    assert await moves.next_request() is second


async def test_wish_that_waited_through_a_move_is_judged_again() -> None:
    clock = _Clock()
    moves = _moves(clock)
    under_way = moves.request_move(SPAN, "test")
    assert await moves.next_request() is under_way
    moves.start(under_way)
    late = moves.request_move(OTHER, "test")
    moves.settle(under_way, "moved")
    waiting = asyncio.create_task(moves.next_request())
    assert await late.wait() == "too_soon"
    clock.now += 60.0
    later = moves.request_move(OTHER, "test")
    assert await waiting is later


@pytest.mark.parametrize("taken", [False, True])
async def test_end_of_the_daemon_settles_what_is_open(taken: bool) -> None:
    moves = _moves(_Clock())
    wish = moves.request_move(SPAN, "test")
    if taken:
        await moves.next_request()
    moves.close()
    assert await wish.wait() == "ended"
    assert moves.request_move(SPAN, "test").outcome == "ended"


async def test_request_is_settled_once_and_takes_no_way_back() -> None:
    moves = _moves(_Clock())
    wish = moves.request_move(SPAN, "test")
    with pytest.raises(AssertionError):
        moves.start(wish)
    assert await moves.next_request() is wish
    moves.start(wish)
    wish.enter(MoveState.RETURNING)
    moves.settle(wish, "failed")
    moves.close()
    assert wish.outcome == "failed"
    assert moves.outcomes == {"failed": 1}
