"""How long a session tries to get its nodes, and how it paces itself."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from nesa_node.core.errors import BusyError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
LOOKS = 3
"""Looks at the swarm, one after another, before missing blocks are refused: one may be of a member
of the DHT that did not answer."""
HOLD_S = 5.0
"""So long a session whose nodes are partly lost keeps the others while replacements are busy."""


class Patience:
    """Decides after each failed attempt, without any I/O.

    Waiting for room is not failing: nodes that say `busy` are there and answer. They are asked for
    `queue_timeout_s` from the beginning; other failures may last for `recovery_timeout_s`, which
    counts from the last `busy`. The pauses grow and are jittered, so that clients which came
    together come apart.
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
        """Leave the nodes that are left: two sessions may be holding each other's half."""
        since = self._busy_since
        return since is not None and self._clock() - since >= self._hold_s

    def pause_s(
        self, error: Exception, *, others_left: bool, hopeless: bool = False
    ) -> float | None:
        """Seconds until the next attempt; None: give up.

        With `others_left` the next attempt goes elsewhere and comes at once. `hopeless` is what
        waiting cannot help, as far as one look can tell.
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
        # The last pause ends with the time there is: the attempt after it is made, too.
        return min(pause_s, until - now) if now < until else None
