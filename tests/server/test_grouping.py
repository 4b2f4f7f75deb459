"""Whichever number of groups gave more tokens is used, and hiccups do not decide."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from nesa_node.server.grouping import AGAIN_S, MOST_GROUPS, Grouping

Takes = Callable[[int], float]
"""How long a step of every session takes, by the number of groups."""


class Bench:
    def __init__(self, takes: Takes, *, fixed: int | None = None) -> None:
        self.grouping = Grouping(fixed)
        self.takes = takes
        self.now = 100.0

    def groups(self, rows: int) -> int:
        return round(rows / self.grouping.group_rows(rows))

    def steps(self, rows: int, count: int, *, disturbed: bool = False) -> Counter[int]:
        """How many of the steps were in how many groups."""
        used: Counter[int] = Counter()
        for _ in range(count):
            groups = self.groups(rows)
            used[groups] += 1
            for _ in range(groups):
                self.grouping.note(rows, rows // groups, self.now, disturbed=disturbed)
                self.now += self.takes(groups) / groups
        return used


def one_is_faster(groups: int) -> float:
    return 0.05 * 1.15 ** (groups - 1)


def two_is_faster(groups: int) -> float:
    return 0.05 / 1.15 ** (groups - 1)


@pytest.mark.parametrize("rows", [4, 6, 16, 64])
def test_the_faster_number_is_found_and_kept(rows: int) -> None:
    for takes, best in ((one_is_faster, 1), (two_is_faster, 2)):
        bench = Bench(takes)
        tried = bench.steps(rows, 60)
        assert set(tried) == {1, MOST_GROUPS}
        assert bench.steps(rows, 500) == {best: 500}


@pytest.mark.parametrize("seed", range(20))
def test_steps_of_uneven_length_do_not_decide(seed: int) -> None:
    rng = random.Random(seed)

    def noisy(groups: int) -> float:
        hiccup = 5.0 if rng.random() < 0.03 else 1.0
        return one_is_faster(groups) * rng.uniform(0.9, 1.1) * hiccup

    bench = Bench(noisy)
    bench.steps(8, 60)
    assert bench.steps(8, 500)[1] > 450


def test_what_makes_no_difference_is_left_as_it_is() -> None:
    rng = random.Random(0)
    bench = Bench(lambda _: 0.05 * rng.uniform(0.98, 1.02))
    bench.steps(8, 60)
    before = bench.groups(8)
    assert bench.steps(8, 300) == {before: 300}


def test_what_is_not_in_use_is_tried_again_after_a_while() -> None:
    bench = Bench(one_is_faster)
    bench.steps(8, 60)
    assert bench.groups(8) == 1
    bench.takes = two_is_faster
    bench.now += AGAIN_S
    bench.steps(8, 60)
    assert bench.steps(8, 100) == {2: 100}


def test_steps_beside_a_prefill_teach_nothing() -> None:
    bench = Bench(one_is_faster)
    assert bench.steps(8, 200, disturbed=True) == {MOST_GROUPS: 200}


def test_each_size_has_its_own() -> None:
    bench = Bench(one_is_faster)
    bench.steps(4, 60)
    bench.takes = two_is_faster
    bench.steps(16, 60)
    assert (bench.groups(4), bench.groups(6), bench.groups(16)) == (1, 1, 2)


def test_two_do_not_wait_for_each_other() -> None:
    bench = Bench(one_is_faster)
    bench.steps(2, 100)
    assert bench.grouping.group_rows(2) == bench.grouping.group_rows(1) == 1


@pytest.mark.parametrize("fixed", [1, 3])
def test_a_fixed_number_stays(fixed: int) -> None:
    bench = Bench(two_is_faster, fixed=fixed)
    assert bench.steps(12, 100) == {fixed: 100}
