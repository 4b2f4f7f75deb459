"""When a session looks for better nodes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from nesa_node.client.recovery.suspicion import FIRST_CHECK_PAUSE_S, MEDIAN_STEPS, SlowdownDetector


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _watch(expected_s: float | None) -> tuple[SlowdownDetector, _Clock]:
    clock = _Clock()
    watch = SlowdownDetector(clock)
    watch.start_chain(expected_s)
    return watch, clock


def _steps(
    watch: SlowdownDetector, clock: _Clock, step_s: float, count: int = MEDIAN_STEPS
) -> list[bool]:
    complaints = []
    for _ in range(count):
        clock.now += step_s
        watch.record_step(step_s)
        complaints.append(watch.should_reconsider())
    return complaints


def test_steps_as_planned_are_no_reason_to_complain() -> None:
    watch, clock = _watch(0.1)
    assert not any(_steps(watch, clock, 0.12, 1000))


def test_a_plan_that_promised_too_much_is_questioned_now_and_then() -> None:
    watch, clock = _watch(0.01)
    complaints = _steps(watch, clock, 0.5, 2000)
    when = [index * 0.5 for index, complains in enumerate(complaints) if complains]
    pauses = [later - earlier for earlier, later in pairwise(when)]
    assert len(pauses) >= 4
    for number, pause_s in enumerate(pauses):
        assert pause_s == pytest.approx(FIRST_CHECK_PAUSE_S * 2**number, abs=1.0)


def test_a_chain_that_gets_slower_is_questioned_whatever_was_promised() -> None:
    watch, clock = _watch(None)
    assert not any(_steps(watch, clock, 0.1, 400))
    assert any(_steps(watch, clock, 0.25, 2 * MEDIAN_STEPS))


def test_a_few_slow_steps_and_the_noise_of_short_ones_are_let_pass() -> None:
    watch, clock = _watch(0.002)
    for _ in range(100):
        assert not any(_steps(watch, clock, 0.015, 8))
        assert not any(_steps(watch, clock, 2.0, 2))


def test_a_new_chain_is_judged_by_itself() -> None:
    watch, clock = _watch(0.01)
    _steps(watch, clock, 0.5)
    watch.start_chain(0.5)
    assert not any(_steps(watch, clock, 0.5, 200))
