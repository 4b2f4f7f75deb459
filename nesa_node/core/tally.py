"""A histogram without a lock or a library, for places where a microsecond counts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Tally:
    """How many values were at most each of `bounds` (ascending), and what they sum up to.

    One thread at a time adds; any may read.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """Between one bound and the next; the last one is of what exceeds all."""
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def copy(self) -> Tally:
        """As it is now: what comes later changes one of the two only."""
        copied = Tally(self.bounds)
        copied.counts, copied.sum = list(self.counts), self.sum
        return copied

    def __iadd__(self, other: Tally) -> Tally:
        """Add all values of another one with the same bounds."""
        assert self.bounds == other.bounds
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum
        return self
