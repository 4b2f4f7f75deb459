"""Whichever number of groups gave more tokens is used, and hiccups do not decide."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from nesa_node.server.scheduler.batch import (
    MAX_MICROBATCHES,
    MAX_TRACKED_CONFIGURATIONS,
    MAX_TRIAL_S,
    SAMPLES_VALID_S,
    MicrobatchTuner,
)

Takes = Callable[[int], float]
"""How long a step of every session takes, by the number of groups."""


class Bench:
    def __init__(self, takes: Takes, *, fixed: int | None = None) -> None:
        self.grouping = MicrobatchTuner(fixed)
        self.takes = takes
        self.now = 100.0

    def steps(self, sessions: int, count: int, *, prefill_every: int = 0) -> Counter[int]:
        """How many of the steps were in how many groups."""
        used: Counter[int] = Counter()
        for step in range(count):
            groups = self.grouping.num_microbatches(sessions)
            used[groups] += 1
            for _ in range(groups):
                if prefill_every and step % prefill_every == 0:
                    self.grouping.discard_sample()
                    self.now += 0.3
                else:
                    self.grouping.record_steps(sessions, sessions // groups, self.now)
                self.now += self.takes(groups) / groups
        return used


def one_is_faster(groups: int) -> float:
    return 0.05 * 1.15 ** (groups - 1)


def two_is_faster(groups: int) -> float:
    return 0.05 / 1.15 ** (groups - 1)


@pytest.mark.parametrize("sessions", [4, 6, 16, 64])
def test_the_faster_number_is_found_and_kept(sessions: int) -> None:
    for takes, best in ((one_is_faster, 1), (two_is_faster, 2)):
        bench = Bench(takes)
        tried = bench.steps(sessions, 60)
        assert set(tried) == {1, MAX_MICROBATCHES}
        assert bench.steps(sessions, 500) == {best: 500}


@pytest.mark.parametrize("prefill_every", [4, 9])
def test_it_is_found_beside_prefills(prefill_every: int) -> None:
    for takes, best in ((one_is_faster, 1), (two_is_faster, 2)):
        bench = Bench(takes)
        bench.steps(8, 200, prefill_every=prefill_every)
        assert bench.steps(8, 50, prefill_every=prefill_every) == {best: 50}


def test_where_nothing_can_be_learnt_it_does_not_stay_with_what_was_tried() -> None:
    bench = Bench(one_is_faster)
    assert bench.steps(8, 200, prefill_every=1) == {MAX_MICROBATCHES: 200}
    bench.steps(8, 15)
    assert bench.grouping.num_microbatches(8) == 1
    bench.steps(8, 4, prefill_every=2)
    bench.now += MAX_TRIAL_S
    bench.steps(8, 20, prefill_every=2)
    assert bench.grouping.num_microbatches(8) == MAX_MICROBATCHES


def test_hours_of_rest_are_no_slow_step() -> None:
    bench = Bench(one_is_faster)
    for _ in range(20):
        bench.steps(8, 7)
        bench.now += 3600
    assert bench.grouping.num_microbatches(8) in (1, 2)
    slow = [seen for seen in bench.grouping._samples.values() if min(seen.rates, default=99.0) < 50]
    assert not slow


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
    before = bench.grouping.num_microbatches(8)
    assert bench.steps(8, 300) == {before: 300}


def test_what_is_not_in_use_is_tried_again_after_a_while() -> None:
    bench = Bench(one_is_faster)
    bench.steps(8, 60)
    assert bench.grouping.num_microbatches(8) == 1
    bench.takes = two_is_faster
    bench.now += SAMPLES_VALID_S
    bench.steps(8, 60)
    assert bench.steps(8, 100) == {2: 100}


def test_each_number_of_sessions_has_its_own() -> None:
    bench = Bench(one_is_faster)
    bench.steps(4, 60)
    bench.takes = two_is_faster
    bench.steps(6, 60)
    assert (bench.grouping.num_microbatches(4), bench.grouping.num_microbatches(6)) == (1, 2)


def test_two_do_not_wait_for_each_other() -> None:
    bench = Bench(one_is_faster)
    bench.steps(3, 100)
    bench.steps(2, 100)
    assert (bench.grouping.num_microbatches(3), bench.grouping.num_microbatches(2)) == (1, 2)


def test_no_more_is_kept_than_there_is_room_for() -> None:
    bench = Bench(one_is_faster)
    for sessions in range(3, 1000):
        bench.steps(sessions, 12)
    assert len(bench.grouping._samples) <= MAX_TRACKED_CONFIGURATIONS + 2


@pytest.mark.parametrize("fixed", [1, 3])
def test_a_fixed_number_stays(fixed: int) -> None:
    bench = Bench(two_is_faster, fixed=fixed)
    assert bench.steps(12, 100) == {fixed: 100}
