"""Wishes that this node should hold another span, and how many of them it grants.

Whoever decides where blocks should be (`rebalance.py`, a planner) asks; `spans.py` carries one wish
out after the other. A wish is granted at most `per_hour` times in any hour, `pause_s` after the
move before, and never where the operator has said which blocks to hold.
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
"""What became of a wish.

"uncovered": nobody else serves some of the blocks that would be given up. "failed": the span could
not be loaded, and the node has gone back to the one before. "ended": the daemon ends.
"""
HOUR_S = 3600.0


class Wish:
    """Made by `Moves.ask`."""

    def __init__(self, span: Span, reason: str, answers: Counter[Answer]) -> None:
        self.span = span
        self.reason = reason
        self._answers = answers
        self.answer: Answer | None = None
        self._answered = asyncio.Event()

    async def wait(self) -> Answer:
        """What became of it, once that is known; after a move, once the node serves the span."""
        await self._answered.wait()
        assert self.answer is not None
        return self.answer

    def settle(self, answer: Answer) -> None:
        """For whoever decides about it. The first answer stays."""
        if self.answer is None:
            self.answer = answer
            self._answers[answer] += 1
            self._answered.set()
            log.info("wish_settled", span=str(self.span), reason=self.reason, answer=answer)


class Moves:
    """Room for one wish that waits: a newer one takes its place. All on the event loop."""

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
        """What became of all wishes so far."""
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
        """Why no move may begin now, whichever; None if one may."""
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
        """Wish that the node held `span`; `reason` is for the log."""
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
        """Wait for a wish that may be granted now; the caller settles it."""
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
        """Count a move: it is under way."""
        self._begun.append(self._clock())

    def end(self) -> None:
        """It is over, well or not: the pause begins."""
        self._ended_at = self._clock()

    def close(self) -> None:
        """Grant nothing any more; what is not settled has ended."""
        self._closed = True
        for wish in (self._waiting, self._taken):
            if wish is not None:
                wish.settle("ended")
