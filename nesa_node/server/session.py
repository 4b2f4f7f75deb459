"""One client's session on this node: checked input steps, emitted outputs, changes of epoch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial

from nesa_node.core.errors import ProtocolError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.server.admission import Place
from nesa_node.server.inbox import Inbox, content_of, examine
from nesa_node.server.outlet import Outlet
from nesa_node.server.prefixes import SessionPrefixes
from nesa_node.server.transfer import CHUNK_TOKENS, Succession, Transfers
from nesa_node.server.work import Work
from nesa_node.swarm.messages import Downstream, Link, Open, Pages, Prefix, Step, Sync
from nesa_node.swarm.stream import Stream
from nesa_node.swarm.tasks import ended
from nesa_node.swarm.wire import Wire

log = get_logger(__name__)

MAX_QUEUED_STEPS = 64
MAX_EARLY_PUSHES = 2
"""Pushes that may wait for their epoch: of a node that replaced the upstream, and of one that
replaced it in turn."""
SMALL_BYTES = 32 * 1024
"""Largest output that the task which received the step may send itself."""


class Session:
    """Session state. Every method runs on the event loop; `run` is the session's worker task.

    The inbox checks steps, the scheduler runs them, the outlet sends outputs. Only the task that
    holds `_emitting` sends: the worker, the task of a step that ran inline, or a change of epoch
    while it truncates the caches and replays what a new neighbour lacks.
    """

    def __init__(
        self,
        opened: Open,
        client: Stream,
        work: Work,
        outlet: Outlet,
        place: Place,
        transfers: Transfers,
        succession: Succession,
        prefixes: SessionPrefixes,
    ) -> None:
        """The caller closes `work`, `outlet` and `transfers`."""
        self.opened = opened
        self.client = client
        self.upstream: PeerId | None = PeerId(opened.upstream) if opened.upstream else None
        self.active_at = time.monotonic()
        self.steps = 0
        """Number of outputs that were sent."""
        self.first_step: tuple[float, float] | None = None
        """When the first step arrived and its output was sent, in seconds since the Unix epoch."""
        self._first_came_at = 0.0
        self.inbox = Inbox(
            session=opened.session,
            rows=opened.rows,
            max_tokens=opened.max_tokens,
            hidden_size=work.blocks.hidden_size,
            dtype=opened.dtype,
            quality=opened.quality,
            outgrow=self._outgrow,
        )
        self.inbox.epoch = opened.epoch
        self._work = work
        self._prefixes = prefixes
        self.inbox.expected = list(self.lengths)
        self._place = place
        self._outlet = outlet
        self._transfers = transfers
        self._succession: Succession | None = succession
        self._adopting = asyncio.Lock()
        self._emitting = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._waiting = 0
        """Tasks that wait for `_changed`."""
        self._early_pushes = 0
        self._pushed: asyncio.Task[None] | None = None
        self._upstream_stream: Stream | None = None
        self._examining = 0
        self._closed = False

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(table.length for table in self._work.tables)

    @property
    def max_transfer_bytes(self) -> int:
        """The largest tensor that a donor may send."""
        return max(
            self._work.blocks.cache_bytes_per_token * CHUNK_TOKENS, self.inbox.max_step_bytes
        )

    @property
    def busy(self) -> bool:
        return self._examining > 0 or self._work.backlog > 0 or self._emitting.locked()

    @property
    def pushed_step(self) -> int:
        """The last step of this epoch that was begun to be pushed; -1 without one."""
        epoch, step = self._outlet.pushed
        return step if epoch == self.inbox.epoch else -1

    @property
    def upstream_bytes(self) -> int:
        """Bytes received on the stream from the upstream node."""
        return 0 if self._upstream_stream is None else self._upstream_stream.heard_bytes

    @property
    def is_handed_over(self) -> bool:
        """Whether a successor is receiving the session."""
        return self._transfers.busy

    @property
    def client_wire(self) -> Wire:
        """The wire format of outputs to the client."""
        return self._outlet.client_wire

    async def submit(self, sender: PeerId, step: Step, payload: bytearray) -> None:
        """Check and queue a step from `sender`; waits while the queue is full.

        Raises `ProtocolError` without changing the session. Calls of one sender must not overlap,
        or steps could overtake each other.
        """
        self.active_at = time.monotonic()
        if sender != (self.upstream or self.client.peer):
            raise ProtocolError("not_upstream", f"{sender} is not upstream of this session")
        self._require_linked()
        if self._closed or self._work.backlog >= MAX_QUEUED_STEPS:
            await self._wait_until(lambda: self._work.backlog < MAX_QUEUED_STEPS)
        self._examining += 1
        try:
            content = await content_of(payload)
            if not self.inbox.wants(step, content):
                return
            hidden = await examine(step, payload)
        finally:
            self._examining -= 1
        self._require_open()
        self._outlet.client_wire.came(step.tensor, payload)
        if not self._first_came_at:
            self._first_came_at = time.time()
        if self.inbox.accept(step, content):
            self._work.submit(step, hidden)
            await self._emit_at_once()

    async def rollback(self, epoch: int, lengths: Sequence[int]) -> None:
        """Begin an epoch with the caches truncated to `lengths`. Raises `ProtocolError`."""
        self._require_linked()
        self._begin_epoch(epoch, lengths)
        async with self._changing(partial(self._truncate, lengths)):
            pass

    async def link(self, link: Link) -> None:
        """Take new neighbours, truncate the caches, and replay what the downstream lacks.

        Returns when everything is sent. Raises `ProtocolError("downstream_lost")` if it cannot be.
        """
        self._check_link(link)
        # Before any step the first link can only cut reused prefix pages: the announced digests
        # still describe the tokens that follow.
        as_announced = self.inbox.epoch == self.opened.epoch
        async with self._adopting:
            self._begin_epoch(link.epoch, link.lengths)
            self._succession = None
        self._outlet.leave_all_but(link.downstream)
        self.upstream = PeerId(link.upstream) if link.upstream else None
        # In a star a node cannot see its position: the first blocks are the likely entry hop.
        first = self.opened.mode == "chain" or self._work.blocks.span.start == 0
        self._work.leads = first and self.upstream is None
        cut = partial(self._truncate, link.lengths, as_announced=as_announced)
        async with self._changing(cut):
            await self._outlet.link(link.downstream, link.epoch, link.emit_from)

    async def reorder(self, epoch: int, sources: Sequence[int]) -> None:
        """Begin an epoch in which each row continues as a copy of row `sources[row]`.

        Raises `ProtocolError`, also while steps are queued.
        """
        self._require_linked()
        rows = len(self._work.tables)
        if len(sources) != rows or max(sources) >= rows:
            raise ProtocolError("bad_rows", f"{len(sources)} sources for {rows} rows")
        if tuple(self.inbox.expected) != self.lengths:
            raise ProtocolError("bad_position", "steps are under way")
        self.inbox.reorder(sources)
        self._begin_epoch(epoch, self.lengths)
        async with self._changing(partial(self._permute, sources)):
            pass

    async def hand_over(self, to: Downstream) -> tuple[int, ...]:
        """Send `to` what it lacks of the session and return the lengths that it holds. Raises
        `ProtocolError`.
        """
        self.active_at = time.monotonic()
        self._require_linked()
        lengths = await self._transfers.sync(to)
        log.info("session_handed_over", peer=to.peer, lengths=lengths)
        return lengths

    def check_donor(self, peer: PeerId) -> None:
        """Raises `ProtocolError` unless `peer` may fill the session now."""
        if self.opened.donor != peer:
            raise ProtocolError("not_donor", f"{peer} is not the donor of this session")
        self._check_unlinked()

    async def adopt(self, message: Pages | Step | Sync, payload: bytearray) -> tuple[int, ...]:
        """Take what the donor sends and return the lengths held. Raises `ProtocolError` once
        linked.
        """
        async with self._adopting:
            self._require_open()
            await self._check_unlinked().take(message, payload)
            self.inbox.expected = list(self.lengths)
        return self.lengths

    def remember(self, prefix: Prefix) -> None:
        """Publish the rows' pages under these digests for later sessions.

        Raises `ProtocolError`.
        """
        self._prefixes.publish_as(prefix)

    async def wait_for_epoch(self, epoch: int) -> None:
        """Wait until the client begins `epoch`, for a push that arrived before its `link`.

        Raises `ProtocolError("future_epoch")` at once if `MAX_EARLY_PUSHES` wait already, since the
        pipe of each holds what arrives meanwhile.
        """
        if self.inbox.epoch < epoch and self._early_pushes >= MAX_EARLY_PUSHES:
            raise ProtocolError("future_epoch", f"{MAX_EARLY_PUSHES} pushes wait already")
        self._early_pushes += 1
        try:
            await self._wait_until(lambda: self.inbox.epoch >= epoch)
        finally:
            self._early_pushes -= 1

    @contextmanager
    def being_pushed(self, stream: Stream) -> Iterator[None]:
        """Register the task that reads the upstream's `stream`; the session's end or a later stream
        cancels it.

        Otherwise an upstream could make this node hold one step per stream, and the memory of an
        ended session.
        """
        self._require_open()
        if self._pushed is not None:
            self._pushed.cancel()
        task = self._pushed = asyncio.current_task()
        self._upstream_stream = stream
        try:
            yield
        finally:
            if self._pushed is task:
                self._pushed = self._upstream_stream = None

    async def run(self) -> None:
        """Emit outputs until cancelled. Raises `ProtocolError` if a step could not be run."""
        while True:
            await self._work.wait_for_output()
            await self._emit_next()

    async def close(self) -> None:
        """Accept no more steps, and return when no iteration uses the caches.

        Also ends a donor's transfer. Completes even when cancelled.
        """
        self._closed = True
        if self._pushed is not None:
            self._pushed.cancel()
        self._outlet.forget()
        letting_go = asyncio.create_task(self._let_go())
        await ended(letting_go)
        letting_go.result()

    async def _let_go(self) -> None:
        await self._notify()
        async with self._adopting:
            self._succession = None
        self._work.halt()
        await self._work.idle()

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`. Raises `ProtocolError` if the session ends first."""
        self._require_open()
        if not condition():
            self._waiting += 1
            try:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._closed or condition())
            finally:
                self._waiting -= 1
            self._require_open()

    async def _emit_at_once(self) -> None:
        """Send an output that was computed inline, since waking the worker would take longer.

        Sends only what needs no waiting: the caller has other messages to read.
        """
        output_bytes = self._work.output_bytes
        small = output_bytes is not None and output_bytes <= SMALL_BYTES
        if not small or self._emitting.locked() or not self._outlet.settled:
            self._work.announce()
            return
        try:
            await self._emit_next()
        except ProtocolError as error:
            self._work.end(error)
        finally:
            self._work.announce()

    async def _emit_next(self) -> None:
        async with self._emitting:
            result = self._work.take_output()
            # A task that began a new epoch is waiting to truncate this step; it must not be sent.
            if result is not None and result[0].epoch == self.inbox.epoch:
                self._prefixes.publish()
                await self._outlet.emit(*result)
                self.steps += 1
                if self.first_step is None:
                    self.first_step = self._first_came_at, time.time()
        self.active_at = time.monotonic()
        await self._notify()

    async def _notify(self) -> None:
        if self._waiting:
            async with self._changed:
                self._changed.notify_all()

    def _require_linked(self) -> None:
        if self._succession is not None and self.opened.donor is not None:
            # While a donor fills the caches no other task may use or change them: pages freed by a
            # rollback could belong to another session when the donor's data is written there.
            raise ProtocolError("not_linked", "a session that is handed over begins with `link`")

    def _check_unlinked(self) -> Succession:
        if self._succession is None:
            raise ProtocolError("unexpected", "the session is already linked here")
        return self._succession

    def _require_open(self) -> None:
        if self._closed:
            raise ProtocolError("unknown_session", "the session has ended")

    def _outgrow(self, have: int, want: int) -> None:
        """Reserve `want` tokens for a row that has `have`. Raises `ProtocolError`."""
        limit = self._work.blocks.context_length
        if want > limit:
            raise ProtocolError("context_length", f"{want} tokens; the model holds {limit}")
        self._place.outgrow(have, want)

    def _check_link(self, link: Link) -> None:
        if len(link.emit_from) != len(link.lengths):
            raise ProtocolError("bad_rows", "`emit_from` and `lengths` must have one entry a row")
        downstream, span = link.downstream, self._work.blocks.span
        if downstream is None:
            return
        if self.opened.mode == "star":
            raise ProtocolError("bad_link", "a star session has no downstream")
        if not span.end == downstream.blocks[0] < downstream.blocks[1]:
            # This also makes a cycle impossible: block numbers only rise along a chain.
            raise ProtocolError("bad_link", f"blocks {downstream.blocks} do not follow {span}")

    def _begin_epoch(self, epoch: int, lengths: Sequence[int]) -> None:
        """Runs without awaiting, or a step of the new epoch could be queued and then dropped."""
        self.active_at = time.monotonic()
        self.inbox.begin_epoch(epoch, lengths)
        self._work.halt()

    @asynccontextmanager
    async def _changing(self, change: Callable[[], None]) -> AsyncIterator[None]:
        """Change the caches while no iteration uses them.

        Inside, no output is emitted, while steps of the new epoch already run.
        """
        await self._notify()
        async with self._emitting:
            try:
                await self._work.idle()
                change()
            finally:
                self._work.resume()
            yield

    def _permute(self, sources: Sequence[int]) -> None:
        self._place.promise.reorder(self._work.tables, sources)
        self._prefixes.reorder(sources)
        self._outlet.reorder(sources)
        self._transfers.truncate([0] * len(sources))
        self.inbox.expected = list(self.lengths)

    def _truncate(self, lengths: Sequence[int], *, as_announced: bool = False) -> None:
        if any(length > have for have, length in zip(self.lengths, lengths, strict=True)):
            self._work.halt()
            self.inbox.expected = list(self.lengths)
            raise ProtocolError(
                "bad_position", f"asked to keep {list(lengths)} of {list(self.lengths)} tokens"
            )
        for table, length in zip(self._work.tables, lengths, strict=True):
            table.truncate(length)
        if not as_announced:
            self._prefixes.truncate(lengths)
        self._outlet.truncate(lengths)
        self._transfers.truncate(lengths)
