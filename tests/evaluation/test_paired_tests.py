"""Tests of differences against values computed by hand and by scipy."""

from __future__ import annotations

import math
import random

import pytest

from nesa_node.evaluation.scoring import mcnemar, mean_and_error, paired_t, student_t


@pytest.mark.parametrize(
    ("gained", "lost", "p_value"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),  # 2 x 1/2
        (5, 0, 0.0625),  # 2 x 1/32
        (0, 6, 0.03125),  # 2 x 1/64
        (3, 3, 1.0),  # 2 x 42/64, capped
        (8, 2, 0.109375),  # 2 x (1 + 10 + 45)/1024
    ],
)
def test_mcnemar_is_that_of_a_fair_coin(gained: int, lost: int, p_value: float) -> None:
    both = 7
    mine = [True] * gained + [False] * lost + [True] * both + [False]
    other = [False] * gained + [True] * lost + [True] * both + [False]
    assert mcnemar(mine, other) == p_value
    assert mcnemar(other, mine) == p_value


def test_mcnemar_takes_thousands_of_items() -> None:
    mine = [True] * 3000 + [False] * 2900
    assert mcnemar(mine, [not right for right in mine]) == pytest.approx(0.197, abs=0.001)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 30, 63, 400])
def test_student_t_agrees_with_scipy(degrees: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    for t in (0.0, 0.3, -1.0, 2.2, 6.0):
        expected = 2 * stats.t.sf(abs(t), degrees)
        assert student_t(t, degrees) == pytest.approx(expected, abs=1e-12)


def test_student_t_of_one_and_two_degrees_is_a_formula() -> None:
    assert student_t(1.0, 1) == pytest.approx(0.5)
    assert student_t(1.5, 2) == pytest.approx(1 - 1.5 / math.sqrt(2 + 1.5**2))


def test_paired_t_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    rng = random.Random(3)
    baseline = [rng.gauss(3, 1) for _ in range(40)]
    values = [value + rng.gauss(0.05, 0.1) for value in baseline]
    ours, theirs = paired_t(values, baseline), stats.ttest_rel(values, baseline)
    assert ours.p_value == pytest.approx(theirs.pvalue, abs=1e-12)
    assert ours.mean / ours.standard_error == pytest.approx(theirs.statistic)


def test_a_run_does_not_differ_from_itself() -> None:
    assert paired_t([1.0, 2.0, 4.0], [1.0, 2.0, 4.0]).p_value == 1.0
    assert paired_t([2.0, 3.0], [1.0, 2.0]).p_value == 0.0


def test_one_value_has_no_standard_error() -> None:
    with pytest.raises(ValueError, match="two values"):
        mean_and_error([1.0])
    with pytest.raises(ValueError, match=r"shorter|longer"):
        paired_t([1.0, 2.0], [1.0])


def test_p_values_of_equal_runs_are_spread_evenly() -> None:
    rng = random.Random(0)
    small = 0
    for _ in range(2000):
        difference = [rng.gauss(0, 1) for _ in range(12)]
        small += paired_t(difference, [0.0] * 12).p_value < 0.05
    assert 70 <= small <= 130
