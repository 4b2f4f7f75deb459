"""Arithmetic of draws and of redundant nodes, against simulation and the paper's figures."""

from __future__ import annotations

import random

import pytest

from nesa_node.verification.detection import (
    majority_probability,
    probability_of_at_least,
    sessions_until_found,
    supermajority_probability,
)

IMAGES, TEXT = 0.9732, 0.9892
"""How often honest hashes agree, by the paper."""


@pytest.mark.parametrize(("rate", "sessions"), [(0.01, 299), (0.05, 59), (0.1, 29), (1.0, 1)])
def test_a_node_that_always_lies_is_drawn_in_time(rate: float, sessions: int) -> None:
    assert sessions_until_found(rate) == sessions
    rng = random.Random(0)
    found = sum(any(rng.random() < rate for _ in range(sessions)) for _ in range(4000))
    assert found / 4000 == pytest.approx(0.95 if rate < 1 else 1.0, abs=0.012)


@pytest.mark.parametrize("wrong", [(0.0, 0.95), (1.1, 0.95), (0.1, 1.0), (0.1, 0.0)])
def test_shares_outside_their_range_are_refused(wrong: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="must be in"):
        sessions_until_found(*wrong)


def percent(value: float) -> float:
    return round(100 * value, 3)


def test_the_papers_figures_and_what_they_should_be() -> None:
    printed = {"99.815": 99.982, "96.785": 96.795, "99.938": 99.886, "99.857": 99.996}
    assert percent(majority_probability(5, IMAGES)) == printed["99.815"]
    assert [percent(supermajority_probability(n, TEXT)) for n in (3, 5, 7)] == [
        printed["96.785"],
        printed["99.938"],
        printed["99.857"],
    ]
    # Those that it has right, within its rounding.
    assert percent(majority_probability(3, IMAGES)) == pytest.approx(99.789, abs=0.0011)
    assert percent(majority_probability(3, TEXT)) == 99.965


def test_two_of_three_at_nine_tenths() -> None:
    assert majority_probability(3, 0.9) == pytest.approx(0.972)
    assert majority_probability(3, 0.9) ** 4 == pytest.approx(0.893, abs=5e-4)


def test_the_binomial_is_that_of_simulation() -> None:
    rng = random.Random(1)
    hits = sum(sum(rng.random() < 0.3 for _ in range(9)) >= 4 for _ in range(20_000))
    assert probability_of_at_least(4, 9, 0.3) == pytest.approx(hits / 20_000, abs=0.01)
