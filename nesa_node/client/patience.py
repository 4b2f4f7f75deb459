"""Retries of building a chain: pauses, time limits, and a limit on concurrent attempts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from nesa_node.core.errors import BusyError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
LOOKS = 3
"""Attempts in a row with missing blocks before giving up: a member of the DHT that did not answer
may explain one."""
HOLD_S = 5.0
"""Seconds for which a session keeps the rest of its nodes while replacements are busy."""


class Patience:
    """Retry policy with backoff. Pure: decides after each failed attempt.

    Busy nodes answer, so waiting for them is limited by `queue_timeout_s` from the start; other
    failures by `recovery_timeout_s` since the last `BusyError`. Pauses grow exponentially with
    jitter, which separates clients that started together.
    """

    def __init__(
        self,
        *,
        queue_timeout_s: float,
        recovery_timeout_s: float,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        now = clock()
        self._queue_until = now + queue_timeout_s
        self._recovery_until = now + recovery_timeout_s
        self._recovery_timeout_s = recovery_timeout_s
        self._pause_s = FIRST_PAUSE_S
        self._busy_since: float | None = None
        self._hopeless_looks = 0
        self._hold_s = HOLD_S * rng.uniform(0.5, 1.5)
        self._rng = rng
        self._clock = clock

    @property
    def queue_left_s(self) -> float:
        return max(self._queue_until - self._clock(), 0.0)

    @property
    def recovery_left_s(self) -> float:
        return max(self._recovery_until - self._clock(), 0.0)

    @property
    def must_let_go(self) -> bool:
        """Whether to release the remaining nodes: two sessions may each hold what the other one
        needs.
        """
        since = self._busy_since
        return since is not None and self._clock() - since >= self._hold_s

    def pause_s(
        self, error: Exception, *, others_left: bool, hopeless: bool = False
    ) -> float | None:
        """Seconds until the next attempt; None: give up.

        With `others_left` the next attempt uses different nodes and follows at once. `hopeless`
        marks failures that waiting does not resolve by the current snapshot.
        """
        self._hopeless_looks = self._hopeless_looks + 1 if hopeless else 0
        if self._hopeless_looks >= LOOKS:
            return None
        now = self._clock()
        until = self._recovery_until
        pause_s = 0.0 if others_left else self._pause_s
        if isinstance(error, BusyError):
            self._busy_since = now if self._busy_since is None else self._busy_since
            self._recovery_until = now + self._recovery_timeout_s
            until = self._queue_until
            pause_s = pause_s and max(error.retry_after_s, pause_s)
        else:
            self._busy_since = None
        if pause_s:
            pause_s *= self._rng.uniform(0.5, 1.5)
            self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
        # The last pause ends at the deadline, so that one more attempt is made.
        return min(pause_s, until - now) if now < until else None
