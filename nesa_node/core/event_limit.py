"""How often the log says the same: peers cause events, and must not fill the disk with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

BURST = 200.0
PER_S = 1.0
TRACEBACK_COST = 10.0
"""Of an event with a traceback, which is so much longer."""
MAX_NAMES = 4096


@dataclass(slots=True)
class _Bucket:
    left: float
    at: float
    dropped: int = 0


class EventLimit:
    """Of each event, by name, `BURST` at once and then `PER_S` each second; the rest is counted.

    `clock` returns seconds and never goes back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def admit(self, name: str, *, has_traceback: bool = False) -> int | None:
        """None: leave it out. Else how many like it were left out since the last one."""
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
