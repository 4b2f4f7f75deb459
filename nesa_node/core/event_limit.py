"""Rate limit of log events: peers cause events and could fill the disk with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

BURST = 200.0
"""Most events of one name that are written at once (capacity of its token bucket)."""
PER_S = 1.0
"""Events of one name that are written per second once the burst is used up."""
TRACEBACK_COST = 10.0
"""Tokens that an event with a traceback costs: it is about ten times as long."""
MAX_NAMES = 4096
"""Most buckets kept; beyond that all are forgotten, which bounds the memory."""


@dataclass(slots=True)
class _Bucket:
    left: float
    at: float
    dropped: int = 0


class EventLimit:
    """Token bucket per event name: `BURST` events at once, then `PER_S` a second.

    `clock` is monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def admit(self, name: str, *, has_traceback: bool = False) -> int | None:
        """Count of dropped events of this name since the last written one; None drops this one."""
        now = self._clock()
        bucket = self._buckets.get(name)
        if bucket is None:
            if len(self._buckets) >= MAX_NAMES:
                self._buckets.clear()
            bucket = self._buckets[name] = _Bucket(BURST, now)
        bucket.left = min(bucket.left + (now - bucket.at) * PER_S, BURST)
        bucket.at = now
        cost = TRACEBACK_COST if has_traceback else 1.0
        if bucket.left < cost:
            bucket.dropped += 1
            return None
        bucket.left -= cost
        dropped, bucket.dropped = bucket.dropped, 0
        return dropped
