"""The loop of a daemon that serves one span after another."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Literal

from nesa_node.core.config import NodeConfig
from nesa_node.core.errors import InsufficientMemoryError, NesaError
from nesa_node.core.logging import get_logger
from nesa_node.core.span import Span
from nesa_node.engine.measure import Throughput
from nesa_node.engine.memory import give_back_memory
from nesa_node.server.announcer import DTYPE_NAMES, Announcer, Capacity
from nesa_node.server.door import Door
from nesa_node.server.ending import Ending
from nesa_node.server.invitation import print_invitation
from nesa_node.server.moves import Answer, Moves, Wish
from nesa_node.server.placement import claim_span, look, require_memory
from nesa_node.server.ready_file import ready_facts, ready_file
from nesa_node.server.refusal_log import RefusalLog
from nesa_node.server.scheduler import Scheduler
from nesa_node.server.served import Served
from nesa_node.server.served_span import ServedSpan, open_span
from nesa_node.server.speed import keep_speed_true
from nesa_node.sharding.holes import is_spared
from nesa_node.swarm.messages import PROTOCOL
from nesa_node.swarm.node import Swarm

log = get_logger(__name__)

MOVE_IDLE_S = 5.0
"""Longest wait for an idle session when the node moves. Its client recomputes the cache elsewhere
when it continues; it may be waiting for the very blocks that the node is to load."""


@dataclass(slots=True)
class _Move:
    """A move in progress. `answer` is its outcome once the node serves again."""

    wish: Wish
    before: Span
    answer: Answer = "moved"


@dataclass(kw_only=True)
class Spans:
    """Serves one span after another under the same peer id and addresses."""

    config: NodeConfig
    served: Served
    swarm: Swarm
    scheduler: Scheduler
    announcer: Announcer
    moves: Moves
    ending: Ending
    refusals: RefusalLog = field(default_factory=RefusalLog)
    part: ServedSpan | None = None
    """The span served now."""
    _door: Door = field(default_factory=Door)
    _move: _Move | None = None
    _invited: bool = False
    _prefix_tokens: tuple[int, int] = (0, 0)
    """Sums over the earlier spans."""

    def prefix_tokens(self) -> tuple[int, int]:
        """Tokens of prefixes that sessions asked for, and that were found in the cache, over all
        spans.
        """
        asked, found = self._prefix_tokens
        if self.part is not None:
            prefixes = self.part.admission.pool.prefixes
            asked, found = asked + prefixes.asked_tokens, found + prefixes.reused_tokens
        return asked, found

    async def run(self) -> None:
        """Claim a span and serve it, then further ones as `moves` grants requests, until shutdown.

        Raises `ModelError`, `ResourceError` and `SwarmError`.
        """
        rng = random.Random(self.swarm.identity.peer_id)
        claim = claim_span(self.config, self.served, self.swarm, self.announcer, rng=rng)
        span = await self.ending.unless(claim)
        await self.swarm.transport.serve(PROTOCOL, self._door.handle)
        try:
            while span is not None:
                span = await self._hold(span)
                # Runs when nothing refers to the old weights: loading begins before the process
                # would return their memory by itself.
                await self.scheduler.executor.run(give_back_memory)
                if self.ending.asked:
                    return
                if span is not None:
                    await self.announcer.announce("joining", span)
        finally:
            self.moves.close()

    async def _hold(self, span: Span) -> Span | None:
        """Load, serve and drain `span`. Returns the next span; None on shutdown."""
        async with AsyncExitStack() as stack:
            opening = open_span(
                self.config, self.served, self.swarm, self.scheduler, span, self.refusals
            )
            try:
                part = await self.ending.unless(stack.enter_async_context(opening))
            except Exception as error:
                # Any error, as torch has its own: the old span could be loaded.
                if self._move is None or span == self._move.before:
                    raise
                return self._back(self._move, error)
            if part is None:
                return None
            self.announcer.throughput, self.announcer.capacity = part.throughput, part.capacity
            self.part = part
            try:
                return await self._serve(part)
            finally:
                # Drop the reference, so that its memory is freed.
                self._prefix_tokens, self.part = self.prefix_tokens(), None
                self.announcer.throughput, self.announcer.capacity = Throughput(0, 0), Capacity

    async def _serve(self, part: ServedSpan) -> Span | None:
        span, drain_s = part.blocks.span, self.config.drain_timeout_s
        with self._door.leading_to(part.server):
            await self.announcer.announce("serving", span)
            with ready_file(self.config.ready_file, ready_facts(self.swarm, self.served, span)):
                self._tell(part)
                self._settle()
                async with keep_speed_true(part.blocks, self.scheduler.executor, self.announcer):
                    wish = await self._next(part)
            if wish is None:
                await self.announcer.announce("draining", span)
                await part.server.drain(drain_s)
                return None
            log.info("move_started", was=str(span), to=str(wish.span), reason=wish.reason)
            self.moves.begin()
            self._move = _Move(wish, span)
            await part.server.drain(drain_s, idle_s=MOVE_IDLE_S)
            return wish.span

    async def _next(self, part: ServedSpan) -> Wish | None:
        """The next granted request, already announced; None on shutdown."""
        while (wish := await self.ending.unless(self.moves.next())) is not None:
            verdict = await self.ending.unless(self._grant(wish, part))
            if verdict == "granted":
                return wish
            if verdict is None:
                return None
            wish.settle(verdict)
        return None

    async def _grant(self, wish: Wish, part: ServedSpan) -> Answer | Literal["granted"]:
        """Announce that the span is given up, or return why it cannot be."""
        span, blocks = part.blocks.span, self.served.checkpoint.num_blocks
        if wish.span == span:
            return "held_already"
        if not 0 <= wish.span.start < wish.span.end <= blocks:
            return "not_of_model"
        try:
            await asyncio.to_thread(
                require_memory,
                self.config,
                self.served,
                wish.span,
                regained_bytes=part.blocks.weight_bytes,
            )
        except InsufficientMemoryError as error:
            log.warning("move_refused", span=str(wish.span), reason=str(error))
            return "no_memory"
        if not await self._is_spared(span):
            return "uncovered"
        await self.announcer.announce("draining", span, next_span=wish.span)
        # Several holders of these blocks may give them up at the same time, each relying on the
        # rest. The last to announce sees it here, before any client was told.
        if not await self._is_spared(span):
            await self.announcer.announce("serving", span)
            return "uncovered"
        return "granted"

    async def _is_spared(self, span: Span) -> bool:
        snapshot = await look(self.served, self.swarm)
        return is_spared(snapshot, self.swarm.identity.peer_id, span)

    def _back(self, move: _Move, error: Exception) -> Span:
        log.error(
            "move_failed",
            span=str(move.wish.span),
            back_to=str(move.before),
            reason=str(error),
            exc_info=None if isinstance(error, NesaError | OSError) else error,
        )
        move.answer = "failed"
        return move.before

    def _settle(self) -> None:
        """Settle the move in progress, if any: the node serves again."""
        if self._move is not None:
            self.moves.end()
            self._move.wish.settle(self._move.answer)
            self._move = None

    def _tell(self, part: ServedSpan) -> None:
        log.info(
            "span_served",
            model=self.served.model_id,
            span=str(part.blocks.span),
            dtype=DTYPE_NAMES[self.served.dtype],
            quant_type=self.served.quant_type,
            weight_mib=part.blocks.weight_bytes >> 20,
            decode_tokens_per_s=round(part.throughput.decode_tokens_per_s, 1),
            cache_tokens=part.admission.total_tokens,
        )
        if not self._invited:
            self._invited = True
            print_invitation(self.config, self.swarm)
