"""Paired significance tests of two runs over the same texts and items.

Items are easy or hard for both runs alike, so that the differences are far less uncertain than the
two results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PairedMean:
    """Mean of the differences, its standard error, and the two-sided p-value of a paired t-test."""

    mean: float
    standard_error: float
    p_value: float


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean of at least two values and its standard error s / sqrt(n); else `ValueError`."""
    count = len(values)
    if count < 2:
        raise ValueError("a standard error needs at least two values")
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, math.sqrt(variance / count)


def paired_t(values: Sequence[float], baseline: Sequence[float]) -> PairedMean:
    """Paired t-test of the same items in two runs; identical runs have p = 1."""
    mean, error = mean_and_error([a - b for a, b in zip(values, baseline, strict=True)])
    if error == 0:
        return PairedMean(mean, 0.0, 1.0 if mean == 0 else 0.0)
    return PairedMean(mean, error, student_t(mean / error, len(values) - 1))


def student_t(t: float, degrees: int) -> float:
    """P(|T| >= |t|) of Student's t-distribution with an integer number of degrees of freedom.

    The finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4, subtracted from 1, so that results
    below 1e-13 are rounding errors.
    """
    if degrees < 1:
        raise ValueError("a t test needs at least one degree of freedom")
    angle = math.atan(abs(t) / math.sqrt(degrees))
    cosine = math.cos(angle)
    odd = degrees % 2
    term, terms = (cosine if odd else 1.0), 0.0
    for index in range(degrees // 2):
        terms += term
        step = 2 * index + 2
        term *= cosine**2 * (step / (step + 1) if odd else (step - 1) / step)
    within = math.sin(angle) * terms
    if odd:
        within = 2 / math.pi * (angle + within)
    return min(1.0, max(0.0, 1 - within))


def mcnemar(right: Sequence[bool], baseline: Sequence[bool]) -> float:
    """McNemar's exact test: the two-sided p-value for correct and wrong answers of two runs.

    Of n items that only one run has correct, k go to the run with fewer; under the null hypothesis
    each is a fair coin flip: p = min(1, 2 sum_{i <= k} C(n, i) / 2^n).
    """
    pairs = list(zip(right, baseline, strict=True))
    gained = sum(mine and not other for mine, other in pairs)
    lost = sum(other and not mine for mine, other in pairs)
    count = gained + lost
    tail = sum(math.comb(count, index) for index in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / (1 << count))
