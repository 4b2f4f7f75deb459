"""Histogram without locks, for hot paths where a microsecond matters."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Tally:
    """Histogram of values with ascending upper `bounds`, and their sum.

    Only one thread at a time may add; any thread may read.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """Values per bucket (not cumulative); the last bucket holds those above all bounds."""
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def copy(self) -> Tally:
        """Independent copy."""
        copied = Tally(self.bounds)
        copied.counts, copied.sum = list(self.counts), self.sum
        return copied

    def __iadd__(self, other: Tally) -> Tally:
        """Add all values of another histogram with the same bounds."""
        assert self.bounds == other.bounds
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum
        return self
