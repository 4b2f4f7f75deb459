"""Fair sharing of a fixed number of slots between API keys."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from nesa_node.web.problem import HttpProblem

SHARE_DIVISOR = 4
"""A key may hold this fraction (1 / SHARE) of the slots, regardless of other keys."""


class FairSlots:
    """`size` slots, shared fairly by keys; `what` names their use, in the plural. Thread-safe.

    A key may hold all slots while it is the only one; beside other keys a quarter, or more while
    half of all are free. A reserve of another quarter beyond `size` is for keys that hold few, so
    that the first key cannot block the next. The caller "" (no key required) may hold `size`.
    """

    def __init__(self, num_slots: int, what: str, *, retry_after_s: float) -> None:
        self.num_slots = num_slots
        self._what = what
        self._retry_after_s = retry_after_s
        self._lock = threading.Lock()
        self._held_of: Counter[str] = Counter()

    @property
    def held(self) -> int:
        with self._lock:
            return self._held_of.total()

    def acquire(self, caller: str, count: int = 1) -> None:
        """Take `count` slots until `release`.

        Raises `HttpProblem` 429 if `caller` has its share, 503 if too few slots are free.
        """
        with self._lock:
            mine, all_of_them = self._held_of[caller] + count, self._held_of.total() + count
            if all_of_them > _max_held(self.num_slots, caller, mine, is_alone=mine == all_of_them):
                raise self._refusal(caller, mine - count, count)
            self._held_of[caller] += count

    def release(self, caller: str, count: int = 1) -> None:
        with self._lock:
            self._held_of[caller] -= count
            self._held_of += Counter()

    @contextmanager
    def hold(self, caller: str, count: int = 1) -> Iterator[None]:
        """Hold `count` slots within the context; errors as for `take`."""
        self.acquire(caller, count)
        try:
            yield
        finally:
            self.release(caller, count)

    def _refusal(self, caller: str, mine: int, count: int) -> HttpProblem:
        share = _fair_share(self.num_slots)
        if not caller or mine + count <= share:
            return HttpProblem(
                503,
                f"there is no room here for {count} more {self._what}: try again later",
                code="busy",
                retry_after_s=self._retry_after_s,
            )
        return HttpProblem(
            429,
            f"too many {self._what} at once: this key has {mine}, and may have "
            f"{share} beside those of other keys; wait until one of them ends",
            code="rate_limit_exceeded",
            retry_after_s=self._retry_after_s,
        )


def _max_held(size: int, caller: str, mine: int, *, is_alone: bool) -> int:
    """Maximum number of slots held by all keys if `caller` then holds `mine`."""
    share = _fair_share(size)
    if caller and mine <= _fair_share(share):
        return size + share
    return size if is_alone or mine <= share else size // 2


def _fair_share(size: int) -> int:
    return max(1, size // SHARE_DIVISOR)
