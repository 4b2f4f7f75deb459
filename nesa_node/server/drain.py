"""Deadline of the sessions on a node that gives up its blocks."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

POLL_S = 0.5
"""Interval at which a busy session is asked whether it is still busy."""


class Drain:
    """A drain that begins once; `clock` returns seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = asyncio.Event()
        self._began_at = 0.0
        self._until = 0.0
        self._idle_s: float | None = None

    @property
    def began(self) -> bool:
        return self._began.is_set()

    def begin(self, timeout_s: float, idle_s: float | None = None) -> None:
        """Give sessions `timeout_s`, and those that do nothing only `idle_s`. A second call cannot
        extend it.
        """
        now = self._clock()
        until = now + timeout_s
        self._until = min(self._until, until) if self.began else until
        self._began_at, self._idle_s = now, idle_s
        self._began.set()

    async def wait(self) -> None:
        await self._began.wait()

    @property
    def left_s(self) -> float:
        return max(self._until - self._clock(), 0.0)

    def left_s_after(self, active_at: float, *, busy: bool) -> float:
        """Seconds until to ask again about a session last active at `active_at`; 0: it must end
        now.
        """
        idle_s = math.inf if self._idle_s is None else self._idle_s
        idle_left_s = max(active_at, self._began_at) + idle_s - self._clock()
        if busy and math.isfinite(idle_s):
            idle_left_s = max(idle_left_s, POLL_S)
        return max(min(self.left_s, idle_left_s), 0.0)
