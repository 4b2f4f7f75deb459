"""Buckets against what they promise, for any order of requests."""

from __future__ import annotations

import itertools
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nesa_node.web import rate_limits as limits_module
from nesa_node.web.key_store import KeyLimits
from nesa_node.web.problem import HttpProblem
from nesa_node.web.rate_limits import RateLimiter


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def asks(limits: RateLimiter, what: KeyLimits, caller: str = "a") -> float | None:
    """None if let in, else how long to wait."""
    try:
        with limits.admit_request(caller, what):
            return None
    except HttpProblem as problem:
        if (problem.status, problem.code) != (429, "rate_limit_exceeded"):
            raise
        return problem.retry_after_s


GAPS = st.lists(st.floats(min_value=0, max_value=90), min_size=1, max_size=60)


@given(gaps=GAPS, per_minute=st.integers(1, 20))
def test_within_any_time_at_most_one_and_its_minutes_times_the_limit(
    gaps: list[float], per_minute: int
) -> None:
    clock = Clock()
    limits, what = RateLimiter(clock), KeyLimits(requests_per_minute=per_minute)
    let_in = []
    for gap in gaps:
        clock.now += gap
        if asks(limits, what) is None:
            let_in.append(clock.now)
    for first, last in itertools.combinations_with_replacement(range(len(let_in)), 2):
        minutes = (let_in[last] - let_in[first]) / 60
        assert last - first + 1 <= per_minute * (1 + minutes) + 1e-6


@given(gaps=GAPS, per_minute=st.integers(1, 20))
def test_who_waits_as_told_is_let_in_and_who_comes_sooner_is_not(
    gaps: list[float], per_minute: int
) -> None:
    clock = Clock()
    limits, what = RateLimiter(clock), KeyLimits(requests_per_minute=per_minute)
    for gap in gaps:
        clock.now += gap
        wait_s = asks(limits, what)
        if wait_s is None:
            continue
        clock.now += wait_s * 0.99
        assert asks(limits, what) is not None
        clock.now += wait_s * 0.01 + 1e-6
        assert asks(limits, what) is None


@given(per_minute=st.integers(1, 1000), count=st.integers(1, 50))
def test_who_keeps_to_the_rate_is_never_refused(per_minute: int, count: int) -> None:
    clock = Clock()
    limits, what = RateLimiter(clock), KeyLimits(requests_per_minute=per_minute)
    for _ in range(count):
        assert asks(limits, what) is None
        clock.now += 60 / per_minute


@given(costs=st.lists(st.integers(0, 500), min_size=1, max_size=40), gap=st.floats(0, 60))
def test_tokens_spent_stay_below_the_limit_but_for_the_last_request(
    costs: list[int], gap: float
) -> None:
    clock = Clock()
    limits, what = RateLimiter(clock), KeyLimits(tokens_per_minute=100)
    began, spent, last = clock.now, 0, 0
    for cost in costs:
        try:
            with limits.admit_request("a", what) as allowance:
                last = cost
                allowance.spend_tokens(cost // 2)
                allowance.spend_tokens(cost - cost // 2)
            spent += cost
        except HttpProblem:
            pass
        assert spent - last <= 100 * (1 + (clock.now - began) / 60) + 1e-6
        clock.now += gap


def test_who_is_refused_has_spent_nothing() -> None:
    clock = Clock()
    limits, what = RateLimiter(clock), KeyLimits(requests_per_minute=1)
    assert asks(limits, what) is None
    for _ in range(100):
        assert asks(limits, what) is not None
    clock.now += 60
    assert asks(limits, what) is None


def fail_in(limits: RateLimiter, what: KeyLimits) -> None:
    with limits.admit_request("a", what):
        assert asks(limits, what) == 1
        raise ZeroDivisionError


def test_requests_at_once_are_counted_until_they_end_however_they_end() -> None:
    limits, what = RateLimiter(Clock()), KeyLimits(concurrent_requests=2)
    with ExitStack() as running:
        running.enter_context(limits.admit_request("a", what))
        with pytest.raises(ZeroDivisionError):
            fail_in(limits, what)
        assert asks(limits, what) is None
        assert asks(limits, what, "b") is None
    assert asks(limits, what) is None


def test_without_limits_nobody_is_refused_and_nothing_is_told() -> None:
    limits = RateLimiter(Clock())
    for _ in range(1000):
        with limits.admit_request("a", KeyLimits()) as allowance:
            assert allowance.headers == {}
            allowance.spend_tokens(10**9)


def test_a_limit_that_appears_later_begins_full() -> None:
    limits = RateLimiter(Clock())
    assert asks(limits, KeyLimits()) is None
    what = KeyLimits(requests_per_minute=2, tokens_per_minute=5)
    assert [asks(limits, what) is None for _ in range(3)] == [True, True, False]


def test_a_clock_that_goes_back_gives_nothing() -> None:
    clock = Clock()
    limits, what = RateLimiter(clock), KeyLimits(requests_per_minute=1)
    assert asks(limits, what) is None
    for back in (500.0, 0.0, 1000.0):
        clock.now = back
        assert asks(limits, what) is not None


@pytest.mark.parametrize(
    ("taken", "told"), [(1, "20s"), (2, "40s"), (3, "1m0s"), (0, "0ms"), (2.99, "59.8s")]
)
def test_when_all_is_free_again_is_told_as_openai_does(taken: float, told: str) -> None:
    assert limits_module._format_duration(taken * 20) == told


def test_memory_is_bounded_and_whoever_runs_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits_module, "MAX_IDLE_CALLERS", 10)
    limits, what = RateLimiter(Clock()), KeyLimits(concurrent_requests=1)
    with limits.admit_request("a", what):
        for number in range(100):
            assert asks(limits, what, f"caller-{number}") is None
            assert len(limits) <= 10
        assert asks(limits, what) == 1
