"""How many threads are chosen, by a machine that is made up: no clock, no threads."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from nesa_node.engine.kernels.threads import MAX_TRIAL_INTERVAL_STEPS, ThreadTuner, clipped_mean

Machine = Callable[[int], float]
"""What a step on so many threads takes there, in seconds."""


def idle(threads: int) -> float:
    return 0.025 / math.pow(threads, 0.6)


def beside_a_busy_process(threads: int) -> float:
    return 0.025 if threads == 1 else 0.09


def jittered(machine: Machine, seed: int = 0) -> Machine:
    rng = random.Random(seed)
    return lambda threads: (
        machine(threads) * rng.uniform(0.9, 1.1) * (4 if rng.random() < 0.02 else 1)
    )


def run(tuner: ThreadTuner, machine: Machine, steps: int) -> list[int]:
    used = []
    for _ in range(steps):
        used.append(tuner.threads)
        tuner.record_step(used[-1], machine(used[-1]))
    return used


def tuner_of(
    counts: Sequence[int] = (1, 2), cores: float = 1.0, start: int | None = None
) -> ThreadTuner:
    return ThreadTuner(counts, lambda: cores, start=start)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("machine", "best"), [(idle, 2), (beside_a_busy_process, 1)])
@pytest.mark.parametrize("start", [1, 2])
def test_the_faster_number_is_found_and_others_are_seldom_tried(
    machine: Machine, best: int, start: int, seed: int
) -> None:
    tuner = tuner_of(start=start)
    run(tuner, jittered(machine, seed), 200)
    used = run(tuner, jittered(machine, seed + 100), 2000)
    assert used.count(best) / len(used) > 0.95
    taken = sum(machine(threads) for threads in used)
    assert taken < 1.08 * machine(best) * len(used)


def test_it_begins_with_as_many_as_there_are_idle_cores() -> None:
    assert tuner_of((1, 2, 4, 8), cores=0.1, start=None)._index == 0
    assert tuner_of((1, 2, 4, 8), cores=6.0, start=None)._index == 2
    assert tuner_of((1, 2, 4, 8), cores=64.0, start=None)._index == 3


def test_many_threads_are_climbed_to_in_one_go() -> None:
    tuner = tuner_of((1, 2, 4, 8, 16), cores=0.0)
    assert not tuner.is_settled or tuner.threads == 1
    tuner = ThreadTuner((1, 2, 4, 8, 16), iter([0.0, *[16.0] * 50]).__next__)
    run(tuner, lambda threads: 0.05 / threads, 120)
    assert tuner.threads == 16
    assert tuner.is_settled


def test_no_more_threads_are_tried_where_no_core_is_idle() -> None:
    tuner = tuner_of(cores=0.0)
    assert set(run(tuner, idle, 2000)) == {1}


def test_fewer_threads_take_over_within_seconds_of_a_process_that_begins() -> None:
    tuner = tuner_of()
    run(tuner, jittered(idle), 500)
    used = run(tuner, jittered(beside_a_busy_process), 100)
    assert used[:30].count(1) > 0
    assert used[40:].count(1) > 50


def test_more_threads_come_back_once_it_has_ended() -> None:
    cores = [0.0]
    tuner = ThreadTuner((1, 2), lambda: cores[0])
    assert set(run(tuner, jittered(beside_a_busy_process), 1000)) == {1}
    cores[0] = 1.0
    used = run(tuner, jittered(idle), MAX_TRIAL_INTERVAL_STEPS + 50)
    assert used[-100:].count(2) > 80


def test_as_fast_on_fewer_threads_is_better() -> None:
    tuner = tuner_of()
    run(tuner, lambda _: 0.02, 400)
    assert tuner.threads == 1


def test_a_hopeless_number_is_given_up_after_its_first_turn() -> None:
    tuner = tuner_of(start=1)
    used = run(tuner, beside_a_busy_process, 100)
    assert used.count(2) == 4


def test_long_steps_are_not_tried_often() -> None:
    """Of seconds each one says enough."""
    tuner = tuner_of(cores=1.0)
    used = run(tuner, lambda threads: 4.0 / threads, 6)
    assert tuner.is_settled
    assert used.count(1) <= 2


def test_steps_of_one_number_with_nothing_to_choose_are_not_counted() -> None:
    tuner = tuner_of((1,), cores=64.0)
    assert tuner.is_settled
    assert set(run(tuner, idle, 200)) == {1}


def test_what_is_typical_shows_waiting_but_not_a_hiccup() -> None:
    assert clipped_mean([1.0] * 7 + [100.0]) == pytest.approx(9 / 8)
    assert clipped_mean([1.0, 1.0, 1.0, 2.0, 2.0]) == pytest.approx(1.4)
