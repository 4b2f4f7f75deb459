from __future__ import annotations

import random

import pytest

from benchmarks.schedule import schedule


def _finish_by_hand(seconds: list[list[float]], node: int, chunk: int) -> float:
    """The longest way through the grid of chunks and nodes, tried in every order."""
    before = [
        _finish_by_hand(seconds, *cell)
        for cell in ((node - 1, chunk), (node, chunk - 1))
        if min(cell) >= 0
    ]
    return max(before, default=0.0) + seconds[node][chunk]


def test_equal_chunks_leave_the_bubbles_that_the_formula_says() -> None:
    plan = schedule([[1.0] * 12] * 3)
    assert plan.makespan_s == 14
    assert plan.bubble_share == plan.idle_share == pytest.approx(2 / 14)
    assert plan.idle_within == [0, 0, 0]
    assert plan.speedup == pytest.approx(36 / 14)


def test_one_node_has_no_bubbles() -> None:
    plan = schedule([[1.0, 2.0, 3.0]])
    assert (plan.makespan_s, plan.bubble_share, plan.speedup) == (6, 0, 1)


def test_slow_first_node_makes_the_second_wait_between_chunks() -> None:
    plan = schedule([[2.0] * 3, [1.0] * 3])
    assert [list(starts) for starts in plan.starts] == [[0, 2, 4], [2, 4, 6]]
    assert plan.idle_within == [0, pytest.approx(2 / 5)]
    assert plan.bubble_share == pytest.approx(1 / 7)
    assert plan.idle_share == pytest.approx(1 - 9 / 14)


def test_every_chunk_ends_when_the_longest_way_to_it_does() -> None:
    rng = random.Random(0)
    for _ in range(50):
        nodes, chunks = rng.randint(1, 4), rng.randint(1, 5)
        seconds = [[rng.uniform(0.1, 2) for _ in range(chunks)] for _ in range(nodes)]
        plan = schedule(seconds)
        for node in range(nodes):
            for chunk in range(chunks):
                expected = _finish_by_hand(seconds, node, chunk)
                assert plan.ends[node][chunk] == pytest.approx(expected)
        assert 0 <= plan.bubble_share <= plan.idle_share + 1e-12 < 1
