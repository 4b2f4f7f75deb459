"""Figures that are made of measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` % of them do not exceed (nearest rank).

    Of fewer than 100 values the 99th is the largest. Raises `ValueError` for none.
    """
    if not values or not 0 < percent <= 100:
        raise ValueError(f"no {percent} percentile of {len(values)} values")
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of the runs' own ratios; what disturbs a run disturbs both of its sides."""
    return median(a / b for a, b in zip(above, below, strict=True))


def gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]
