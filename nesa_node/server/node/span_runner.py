"""The loop of a daemon that serves one span after another."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Literal

from nesa_node.compression.tensors import DTYPE_NAMES
from nesa_node.core.errors import (
    InsufficientMemoryError,
    NesaError,
    ProtocolError,
    StreamClosedError,
)
from nesa_node.core.ids import PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.core.settings.models import NodeConfig
from nesa_node.engine.model.devices import SpanThroughput, release_memory
from nesa_node.server.node.announcer import Announcer, Capacity
from nesa_node.server.node.invitation import print_invitation, ready_file, ready_file_fields
from nesa_node.server.node.move_limiter import MoveLimiter, MoveOutcome, MoveRequest, MoveState
from nesa_node.server.node.node_model import NodeModel
from nesa_node.server.node.served_span import DecoderSpan, ServedSpan, SpanServer
from nesa_node.server.node.shutdown import Shutdown
from nesa_node.server.node.span_choice import claim_span
from nesa_node.server.scheduler.scheduler import Scheduler
from nesa_node.server.session.message_loop import RefusalLog, receive_first_message, send_refusal
from nesa_node.sharding.span_placement import is_covered_without
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.protocol.messages import PROTOCOL
from nesa_node.swarm.protocol.stream import Stream

log = get_logger(__name__)


class StreamListener:
    """Routes streams to the current span's server; refuses them (`draining`) between two spans."""

    def __init__(self) -> None:
        self._server: SpanServer | None = None

    @contextmanager
    def routing_to(self, server: SpanServer) -> Iterator[None]:
        self._server = server
        try:
            yield
        finally:
            self._server = None

    def handle(
        self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Coroutine[object, object, None]:
        """Serve one incoming stream until its final message; the caller closes it."""
        # Returned, not awaited here: each message would resume one more coroutine.
        handler = self._refuse if self._server is None else self._server.handle
        return handler(peer, reader, writer)

    async def _refuse(
        self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        stream = Stream(peer, reader, writer)
        try:
            # Read before it is refused: see `SessionServer.handle`.
            await receive_first_message(stream)
            await send_refusal(
                stream, ProtocolError("draining", "this node is changing its blocks")
            )
        except StreamClosedError:
            log.debug("stream_ended", peer=peer)
        except ProtocolError as error:
            await send_refusal(stream, error)


MOVE_IDLE_S = 5.0
"""Longest wait for an idle session when the node moves. Its client recomputes the cache elsewhere
when it continues; it may be waiting for the very blocks that the node is to load."""


@dataclass(kw_only=True)
class SpanRunner:
    """Serves one span after another under the same peer id and addresses."""

    config: NodeConfig
    served: NodeModel
    swarm: Swarm
    scheduler: Scheduler
    announcer: Announcer
    move_limiter: MoveLimiter
    shutdown: Shutdown
    open_span: Callable[[Span], AbstractAsyncContextManager[ServedSpan]]
    """Loads a span."""
    protocol: str = PROTOCOL
    """Of the streams that spans serve."""
    refusals: RefusalLog = field(default_factory=RefusalLog)
    served_span: ServedSpan | None = None
    """The span served now."""
    _listener: StreamListener = field(default_factory=StreamListener)
    _move: tuple[MoveRequest, Span] | None = None
    """The move in progress, and the span from which it began."""
    _invitation_printed: bool = False
    _past_prefix_tokens: tuple[int, int] = (0, 0)
    """Sums over the earlier spans."""

    def prefix_tokens(self) -> tuple[int, int]:
        """Tokens of prefixes that sessions asked for, and those found cached, over all spans."""
        asked, found = self._past_prefix_tokens
        if isinstance(self.served_span, DecoderSpan):
            prefixes = self.served_span.admission.pool.prefixes
            asked, found = asked + prefixes.queried_tokens, found + prefixes.reused_tokens
        return asked, found

    def find_served_span(self) -> Span | None:
        """The span that is served now; None in between."""
        return None if self.served_span is None else self.served_span.span

    def find_served_weights(self) -> tuple[Span, bytes] | None:
        """The span that is served now and the root of its weights; None in between, and where
        nothing asked for roots.
        """
        now = self.served_span
        if now is None or now.weights_root is None:
            return None
        return now.span, now.weights_root

    async def run(self) -> None:
        """Claim a span and serve it, then further ones as `move_limiter` grants requests, until
        shutdown.

        Raises `ModelError`, `ResourceError` and `SwarmError`.
        """
        rng = random.Random(self.swarm.identity.peer_id)
        claim = claim_span(self.config, self.served, self.swarm, self.announcer, rng=rng)
        span = await self.shutdown.run_until_shutdown(claim)
        await self.swarm.transport.serve(self.protocol, self._listener.handle)
        try:
            while span is not None:
                span = await self._run_span(span)
                # Runs when nothing refers to the old weights: loading begins before the process
                # would return their memory by itself.
                await self.scheduler.executor.run(release_memory)
                if self.shutdown.is_requested:
                    return
                if span is not None:
                    await self.announcer.announce("joining", span)
        finally:
            self.move_limiter.close()

    async def _run_span(self, span: Span) -> Span | None:
        """Load, serve and drain `span`. Returns the next span; None on shutdown."""
        async with AsyncExitStack() as stack:
            try:
                served_span = await self.shutdown.run_until_shutdown(
                    stack.enter_async_context(self.open_span(span))
                )
            except Exception as error:
                # Any error, as torch has its own: the old span could be loaded.
                if self._move is None or span == self._move[1]:
                    raise
                return self._fall_back(*self._move, error)
            if served_span is None:
                return None
            self.announcer.throughput = served_span.throughput
            self.announcer.capacity = served_span.capacity
            self.served_span = served_span
            try:
                return await self._serve(served_span)
            finally:
                # Drop the reference, so that its memory is freed.
                self._past_prefix_tokens, self.served_span = self.prefix_tokens(), None
                self.announcer.throughput, self.announcer.capacity = SpanThroughput(0, 0), Capacity

    async def _serve(self, served_span: ServedSpan) -> Span | None:
        span, drain_s = served_span.span, self.config.drain_timeout_s
        with self._listener.routing_to(served_span.server):
            await self.announcer.announce("serving", span)
            with ready_file(
                self.config.ready_file, ready_file_fields(self.swarm, self.served, span)
            ):
                self._log_serving(served_span)
                if self._move is not None:
                    failed = self._move[0].state is MoveState.RETURNING
                    self.move_limiter.settle(self._move[0], "failed" if failed else "moved")
                    self._move = None
                async with served_span.keep_speed_current(self.announcer, self.config.cache_dir):
                    request = await self._next_move(served_span)
            if request is None:
                await self.announcer.announce("draining", span)
                await served_span.server.drain(drain_s)
                return None
            log.info("move_started", was=str(span), to=str(request.span), reason=request.reason)
            self.move_limiter.start(request)
            self._move = request, span
            await served_span.server.drain(drain_s, idle_s=MOVE_IDLE_S)
            return request.span

    async def _next_move(self, served_span: ServedSpan) -> MoveRequest | None:
        """The next granted request, already announced; None on shutdown."""
        while (
            request := await self.shutdown.run_until_shutdown(self.move_limiter.next_request())
        ) is not None:
            verdict = await self.shutdown.run_until_shutdown(self._try_grant(request, served_span))
            if verdict == "granted":
                return request
            if verdict is None:
                return None
            self.move_limiter.settle(request, verdict)
        return None

    async def _try_grant(
        self, request: MoveRequest, served_span: ServedSpan
    ) -> MoveOutcome | Literal["granted"]:
        """Announce that the span is given up, or return why it cannot be."""
        span, blocks = served_span.span, self.served.num_blocks
        if request.span == span:
            return "held_already"
        if not 0 <= request.span.start < request.span.end <= blocks:
            return "not_of_model"
        try:
            await asyncio.to_thread(
                self.served.require_memory,
                self.config,
                request.span,
                regained_bytes=served_span.weight_bytes,
            )
        except InsufficientMemoryError as error:
            log.warning("move_refused", span=str(request.span), reason=str(error))
            return "no_memory"
        if not await self._is_spared(span):
            return "uncovered"
        await self.announcer.announce("draining", span, next_span=request.span)
        # Several holders of these blocks may give them up at the same time, each relying on the
        # rest. The last to announce sees it here, before any client was told.
        if not await self._is_spared(span):
            await self.announcer.announce("serving", span)
            return "uncovered"
        return "granted"

    async def _is_spared(self, span: Span) -> bool:
        model_id, num_blocks = self.served.model_id, self.served.num_blocks
        snapshot = await self.swarm.directory.fetch(model_id, num_blocks)
        return is_covered_without(snapshot, self.swarm.identity.peer_id, span)

    def _fall_back(self, request: MoveRequest, old_span: Span, error: Exception) -> Span:
        log.error(
            "move_failed",
            span=str(request.span),
            back_to=str(old_span),
            reason=str(error),
            exc_info=None if isinstance(error, NesaError | OSError) else error,
        )
        request.enter(MoveState.RETURNING)
        return old_span

    def _log_serving(self, served_span: ServedSpan) -> None:
        log.info(
            "span_served",
            model=self.served.model_id,
            span=str(served_span.span),
            dtype=DTYPE_NAMES[self.served.dtype],
            quant_type=self.served.quant_type,
            cache_dtype=self.served.cache_dtype,
            weight_mib=served_span.weight_bytes >> 20,
            decode_tokens_per_s=round(served_span.throughput.decode_tokens_per_s, 1),
            cache_tokens=served_span.capacity().total_tokens,
        )
        if not self._invitation_printed:
            self._invitation_printed = True
            print_invitation(self.config, self.swarm)
