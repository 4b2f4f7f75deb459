from __future__ import annotations

import pytest

from benchmarks.figures import gaps, median_ratio, percentile


def test_percentile_is_a_value_that_was_measured() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert percentile(values, 50) == 50
    assert percentile(values, 99) == 99
    assert percentile(values, 100) == 100
    assert percentile([3.0, 1.0, 2.0], 50) == 2
    assert percentile([3.0, 1.0, 2.0], 99) == 3
    assert percentile([7.0], 1) == 7


def test_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="of 0 values"):
        percentile([], 50)
    with pytest.raises(ValueError, match="no 0 percentile"):
        percentile([1.0], 0)


def test_ratio_is_the_median_of_each_runs_own_ratio() -> None:
    # One run was disturbed on both sides: the ratio of the medians would be 2.
    assert median_ratio([2.0, 40.0, 6.0], [2.0, 10.0, 3.0]) == 2.0
    assert median_ratio([1.0, 100.0, 9.0], [1.0, 10.0, 3.0]) == 3.0


def test_runs_without_a_partner_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        median_ratio([1.0, 2.0], [1.0])


def test_gaps_lie_between_the_times() -> None:
    assert gaps([1.0, 3.0, 3.5]) == [2.0, 0.5]
    assert gaps([1.0]) == []
