"""What is learnt of a device's times, and what follows from it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nesa_node.server.scheduler.policy import INITIAL_S_PER_TOKEN, CostModel


def test_before_anything_ran_a_device_is_taken_for_slow() -> None:
    assert CostModel().max_tokens_within(0.25, 1000) == int(0.25 / INITIAL_S_PER_TOKEN)


def test_between_two_known_times_lies_a_line() -> None:
    cost = CostModel()
    for _ in range(30):
        cost.observe(16, 0.4)
    assert cost.predict_s(1) == pytest.approx(0.4)
    assert cost.predict_s(64) == pytest.approx(1.6)
    for _ in range(30):
        cost.observe(1, 0.1)
    assert cost.predict_s(6) == pytest.approx(0.2)
    assert cost.predict_s(16) == pytest.approx(0.4)


def test_a_time_that_cannot_be_any_more_is_corrected() -> None:
    cost = CostModel()
    for tokens in (1, 4, 64):
        for _ in range(30):
            cost.observe(tokens, tokens * 1.0)
    for _ in range(30):
        cost.observe(1, 0.1)
    assert cost.predict_s(4) == pytest.approx(0.4, rel=0.01)
    assert cost.predict_s(64) == pytest.approx(6.4, rel=0.01)


def test_one_hiccup_teaches_little_and_a_slower_device_is_noticed() -> None:
    cost = CostModel()
    cost.observe(4, 0.1)
    cost.observe(4, 100.0)
    assert cost.predict_s(4) < 0.15
    for _ in range(40):
        cost.observe(4, 1.0)
    assert cost.predict_s(4) == pytest.approx(1.0, rel=0.01)


@given(
    st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-5, 10)), max_size=30),
    st.floats(1e-5, 10),
    st.integers(1, 2000),
)
def test_what_fits_into_a_time_takes_no_longer(
    seen: list[tuple[int, float]], seconds: float, most: int
) -> None:
    cost = CostModel()
    for tokens, took in seen:
        cost.observe(tokens, took)
    fitting = cost.max_tokens_within(seconds, most)
    assert 0 <= fitting <= most
    assert not fitting or cost.predict_s(fitting) <= seconds
    assert fitting == most or cost.predict_s(fitting + 1) > seconds


@given(
    st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-5, 10)), max_size=30),
    st.lists(st.integers(1, 5000), min_size=2),
)
def test_more_tokens_never_take_less(seen: list[tuple[int, float]], asked: list[int]) -> None:
    cost = CostModel()
    for tokens, took in seen:
        cost.observe(tokens, took)
    times = [cost.predict_s(tokens) for tokens in sorted(asked)]
    assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(times))


def test_chunks_approach_a_time() -> None:
    cost = CostModel()
    cost.observe(1, 0.02)
    longest = 0.0
    for _ in range(60):
        tokens = max(cost.max_tokens_within(0.06, 1000), 1)
        took = 0.019 + 0.001 * tokens
        longest = max(longest, took)
        cost.observe(tokens, took)
    assert longest <= 0.06 * 1.05
    assert tokens > 30
