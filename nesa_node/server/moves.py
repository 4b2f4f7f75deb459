"""Requests that this node should serve another span, and the limit on how many it grants.

`rebalance` and `follow` request moves; `Spans` carries out one after another. At most
`per_hour` are granted in any hour, `pause_s` apart, and none where the operator has pinned the
blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Literal

from nesa_node.core.logging import get_logger
from nesa_node.core.span import Span

log = get_logger(__name__)

Answer = Literal[
    "moved",
    "pinned",
    "too_many",
    "too_soon",
    "superseded",
    "held_already",
    "not_of_model",
    "no_memory",
    "uncovered",
    "failed",
    "ended",
]
"""Outcome of a request.

"uncovered": some blocks of the old span would lose their last holder. "failed": the span could not
be loaded, and the node returned to the old one. "ended": the daemon ends.
"""
HOUR_S = 3600.0


class Wish:
    """A move request, made by `Moves.ask`."""

    def __init__(self, span: Span, reason: str, answers: Counter[Answer]) -> None:
        self.span = span
        self.reason = reason
        self._answers = answers
        self.answer: Answer | None = None
        self._answered = asyncio.Event()

    async def wait(self) -> Answer:
        """Wait for the outcome; that of a granted move is known once the node serves again."""
        await self._answered.wait()
        assert self.answer is not None
        return self.answer

    def settle(self, answer: Answer) -> None:
        """Set the outcome. Only the first call counts."""
        if self.answer is None:
            self.answer = answer
            self._answers[answer] += 1
            self._answered.set()
            log.info("move_request_settled", span=str(self.span), reason=self.reason, answer=answer)


class Moves:
    """Move limiter with room for one waiting request: a newer one replaces it. Runs on the event
    loop.
    """

    def __init__(
        self,
        *,
        per_hour: int,
        pause_s: float,
        pinned: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pinned = pinned
        self.answers: Counter[Answer] = Counter()
        """Outcomes of all requests so far."""
        self._per_hour = per_hour
        self._pause_s = pause_s
        self._clock = clock
        self._begun: deque[float] = deque()
        self._ended_at: float | None = None
        self._waiting: Wish | None = None
        self._taken: Wish | None = None
        self._asked = asyncio.Event()
        self._closed = False

    @property
    def refusal(self) -> Answer | None:
        """Why no move may begin now; None if one may."""
        now = self._clock()
        while self._begun and self._begun[0] <= now - HOUR_S:
            self._begun.popleft()
        if self._closed:
            return "ended"
        if self.pinned:
            return "pinned"
        if len(self._begun) >= self._per_hour:
            return "too_many"
        if self._ended_at is not None and now < self._ended_at + self._pause_s:
            return "too_soon"
        return None

    def ask(self, span: Span, reason: str) -> Wish:
        """Request a move to `span`; `reason` is for the log."""
        wish = Wish(span, reason, self.answers)
        refusal = self.refusal
        if refusal is not None:
            wish.settle(refusal)
            return wish
        if self._waiting is not None:
            self._waiting.settle("superseded")
        self._waiting = wish
        self._asked.set()
        return wish

    async def next(self) -> Wish:
        """Wait for a request that may be granted now; the caller settles it."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            wish, self._waiting = self._waiting, None
            assert wish is not None
            refusal = self.refusal
            if refusal is None:
                self._taken = wish
                return wish
            wish.settle(refusal)

    def begin(self) -> None:
        """Count a move that begins."""
        self._begun.append(self._clock())

    def end(self) -> None:
        """Record that a move ended, with or without success; the pause begins."""
        self._ended_at = self._clock()

    def close(self) -> None:
        """Grant no more requests; unsettled ones get the outcome "ended"."""
        self._closed = True
        for wish in (self._waiting, self._taken):
            if wish is not None:
                wish.settle("ended")
