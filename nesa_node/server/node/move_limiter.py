"""Requests that this node should serve another span, and the limit on how many it grants.

`fill_holes` and `follow_placements` request moves; `SpanRunner` carries out one after another.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from typing import Literal

from nesa_node.core.errors import SwarmError
from nesa_node.core.ids import PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.sharding.span_placement import plan_repairs, unheld_blocks
from nesa_node.topology.snapshot import Snapshot

log = get_logger(__name__)

MoveOutcome = Literal[
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


class MoveState(Enum):
    """State of a request; `MOVE_TRANSITIONS` has the ways from one to the next."""

    WAITING = auto()
    GRANTED = auto()
    """Taken by `SpanRunner`, which may still refuse it."""
    MOVING = auto()
    RETURNING = auto()
    """The span could not be loaded: the node goes back to the old one."""
    SETTLED = auto()


MOVE_TRANSITIONS = {
    MoveState.WAITING: {MoveState.GRANTED, MoveState.SETTLED},
    MoveState.GRANTED: {MoveState.MOVING, MoveState.SETTLED},
    MoveState.MOVING: {MoveState.RETURNING, MoveState.SETTLED},
    MoveState.RETURNING: {MoveState.SETTLED},
}


class MoveRequest:
    """A move request, made and changed by `MoveLimiter`."""

    def __init__(self, span: Span, reason: str) -> None:
        self.span = span
        self.reason = reason
        self.state = MoveState.WAITING
        self.outcome: MoveOutcome | None = None
        self.settled = asyncio.Event()

    async def wait(self) -> MoveOutcome:
        """Wait for the outcome; that of a granted move is known once the node serves again."""
        await self.settled.wait()
        assert self.outcome is not None
        return self.outcome

    def enter(self, state: MoveState) -> None:
        assert state in MOVE_TRANSITIONS[self.state], f"{self.state} to {state}"
        self.state = state


class MoveLimiter:
    """Owner of the requests, with room for one that waits: a newer one replaces it.

    At most `per_hour` are granted in any hour, `pause_s` apart, and none where the operator has
    pinned the blocks. Runs on the event loop.
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
        self.outcomes: Counter[MoveOutcome] = Counter()
        """Outcomes of all requests so far."""
        self._per_hour = per_hour
        self._pause_s = pause_s
        self._clock = clock
        self._started_at: deque[float] = deque()
        self._ended_at = -math.inf
        self._pending: MoveRequest | None = None
        self._granted: MoveRequest | None = None
        self._has_request = asyncio.Event()
        self._closed = False

    @property
    def refusal(self) -> MoveOutcome | None:
        """Why no move may begin now; None if one may."""
        now = self._clock()
        while self._started_at and self._started_at[0] <= now - HOUR_S:
            self._started_at.popleft()
        if self._closed:
            return "ended"
        if self.pinned:
            return "pinned"
        if len(self._started_at) >= self._per_hour:
            return "too_many"
        if now < self._ended_at + self._pause_s:
            return "too_soon"
        return None

    def request_move(self, span: Span, reason: str) -> MoveRequest:
        """Request a move to `span`; `reason` is for the log."""
        request = MoveRequest(span, reason)
        if (refusal := self.refusal) is not None:
            self.settle(request, refusal)
            return request
        if self._pending is not None:
            self.settle(self._pending, "superseded")
        self._pending = request
        self._has_request.set()
        return request

    async def next_request(self) -> MoveRequest:
        """Wait for a request that may be granted now; the caller settles it."""
        while True:
            await self._has_request.wait()
            self._has_request.clear()
            request, self._pending = self._pending, None
            assert request is not None
            if (refusal := self.refusal) is None:
                request.enter(MoveState.GRANTED)
                self._granted = request
                return request
            self.settle(request, refusal)

    def start(self, request: MoveRequest) -> None:
        """Begin a granted move, which counts from now on."""
        request.enter(MoveState.MOVING)
        self._started_at.append(self._clock())

    def settle(self, request: MoveRequest, outcome: MoveOutcome) -> None:
        """Set the outcome; only the first call counts. The pause begins where a move ends."""
        if request.state is MoveState.SETTLED:
            return
        if request.state in (MoveState.MOVING, MoveState.RETURNING):
            self._ended_at = self._clock()
        request.enter(MoveState.SETTLED)
        request.outcome = outcome
        self.outcomes[outcome] += 1
        request.settled.set()
        log.info(
            "move_request_settled", span=str(request.span), reason=request.reason, answer=outcome
        )

    def close(self) -> None:
        """Grant no more requests; unsettled ones get the outcome "ended"."""
        self._closed = True
        for request in (self._pending, self._granted):
            if request is not None:
                self.settle(request, "ended")


HOLE_CHECK_JITTER = (0.8, 1.2)
"""Jitter of the interval between snapshots, so that nodes do not fetch at the same time."""


async def fill_holes(
    fetch_snapshot: Callable[[], Awaitable[Snapshot]],
    peer_id: PeerId,
    move_limiter: MoveLimiter,
    *,
    every_s: float,
    rng: random.Random,
) -> None:
    """Check for holes about every `every_s` seconds, until cancelled.

    This rule heals a swarm that has lost a region, where no orchestrator plans: nodes with blocks
    that have other holders move to blocks without one; all other nodes stay.
    A block must lack a holder in two consecutive snapshots: a restarting node or a late record is
    no reason to move. `MoveLimiter` and its limits contain the effect of other wrong snapshots.
    """
    before: frozenset[int] = frozenset()
    while True:
        await asyncio.sleep(every_s * rng.uniform(*HOLE_CHECK_JITTER))
        try:
            snapshot = await fetch_snapshot()
        except (SwarmError, OSError) as error:
            log.warning("snapshot_not_fetched", reason=str(error))
            continue
        except Exception:  # a bug: the node continues, and holes still need filling
            log.exception("snapshot_not_fetched")
            continue
        holes = unheld_blocks(snapshot)
        staying, before = holes & before, holes
        if not staying:
            continue
        # Records of hostile nodes can make this take a second.
        repairs = await asyncio.to_thread(plan_repairs, snapshot, staying)
        span = repairs.get(peer_id)
        log.info("blocks_unheld", blocks=sorted(staying), mine=None if span is None else str(span))
        if span is not None:
            await move_limiter.request_move(span, "these blocks have no holder").wait()
            before = frozenset()
