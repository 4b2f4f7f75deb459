"""How many places of a room that all requests share one key may hold."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from nesa_node.web.problem import Problem

SHARE = 4
"""A key may hold one in so many places whatever other keys hold."""


class Shares:
    """`size` places for what is held at once; `what` names it, in the plural. Safe for threads.

    One key may hold all places while it is the only one, and a quarter beside others, or more
    while half of all are free. Beyond `size` there is a reserve of a quarter for keys that hold
    little, so that a key that came first leaves room for the next. The caller "" is that of servers
    which ask for no key: it may hold `size`.
    """

    def __init__(self, size: int, what: str, *, retry_after_s: float) -> None:
        self.size = size
        self._what = what
        self._retry_after_s = retry_after_s
        self._guard = threading.Lock()
        self._held_of: Counter[str] = Counter()

    @property
    def held(self) -> int:
        with self._guard:
            return self._held_of.total()

    def take(self, caller: str, count: int = 1) -> None:
        """Hold so many places more, until they are given back.

        Raises `Problem`: 429 where `caller` has its share, 503 where there is no room.
        """
        with self._guard:
            mine, all_of_them = self._held_of[caller] + count, self._held_of.total() + count
            if all_of_them > _most(self.size, caller, mine, is_alone=mine == all_of_them):
                raise self._refusal(caller, mine - count, count)
            self._held_of[caller] += count

    def give_back(self, caller: str, count: int = 1) -> None:
        with self._guard:
            self._held_of[caller] -= count
            self._held_of += Counter()

    @contextmanager
    def holding(self, caller: str, count: int = 1) -> Iterator[None]:
        """As `take`, until this ends."""
        self.take(caller, count)
        try:
            yield
        finally:
            self.give_back(caller, count)

    def _refusal(self, caller: str, mine: int, count: int) -> Problem:
        share = _share(self.size)
        if not caller or mine + count <= share:
            return Problem(
                503,
                f"there is no room here for {count} more {self._what}: try again later",
                code="busy",
                retry_after_s=self._retry_after_s,
            )
        return Problem(
            429,
            f"too many {self._what} at once: this key has {mine}, and may have "
            f"{share} beside those of other keys; wait until one of them ends",
            code="rate_limit_exceeded",
            retry_after_s=self._retry_after_s,
        )


def _most(size: int, caller: str, mine: int, *, is_alone: bool) -> int:
    """How many places may be held by all, with the `mine` that `caller` would hold."""
    share = _share(size)
    if caller and mine <= _share(share):
        return size + share
    return size if is_alone or mine <= share else size // 2


def _share(size: int) -> int:
    return max(1, size // SHARE)
