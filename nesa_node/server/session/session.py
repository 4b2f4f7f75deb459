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
from nesa_node.server.scheduler.scheduler import Scheduler
from nesa_node.server.session.admission import SessionGrant
from nesa_node.server.session.neighbours import NEIGHBOUR_TIMEOUT_S
from nesa_node.server.session.output_sender import OutputSender
from nesa_node.server.session.session_state import (
    SessionState,
    StepSequencer,
    content_key,
    decode_step,
)
from nesa_node.server.session.transfer import TRANSFER_CHUNK_TOKENS, SessionDonor, TransferReceiver
from nesa_node.swarm.p2p.tasks import wait_until_done
from nesa_node.swarm.protocol.messages import (
    Downstream,
    Link,
    Pages,
    QuantizedPages,
    RowSlice,
    Step,
    Sync,
)
from nesa_node.swarm.protocol.replay_buffer import ReplayBuffer
from nesa_node.swarm.protocol.seal_messages import SEALED_SINCE
from nesa_node.swarm.protocol.stream import Stream

log = get_logger(__name__)

MAX_QUEUED_STEPS = 64
MAX_EARLY_PUSHES = 2
"""Pushes that may wait for their epoch: of a node that replaced the upstream, and of one that
replaced it in turn."""
MAX_DISCLOSURES = 4
"""Times that a session's client may have outputs disclosed: each sends as much as the session did.
"""
MAX_INLINE_OUTPUT_BYTES = 32 * 1024
"""Largest output that the task which received the step may send itself."""


class Session:
    """Session state. Every method runs on the event loop; `run` is the session's worker task.

    The sequencer checks steps, the scheduler runs them, the sender sends outputs. Only the task
    that holds `_emit_lock` sends: the worker, the task of a step that ran inline, or a change of
    epoch while it truncates the caches and replays what a new neighbour lacks.
    """

    def __init__(
        self,
        client: Stream,
        state: SessionState,
        scheduler: Scheduler,
        sender: OutputSender,
        grant: SessionGrant,
        donor: SessionDonor,
        receiver: TransferReceiver,
    ) -> None:
        """The caller closes the queue, the sender's streams and `donor`."""
        self.opened = opened = state.opened
        self.client = client
        self.state = state
        self.upstream: PeerId | None = PeerId(opened.upstream) if opened.upstream else None
        self.active_at = time.monotonic()
        self.emitted_steps = 0
        """Number of outputs that were sent."""
        self.first_step_times: tuple[float, float] | None = None
        """When the first step arrived and its output was sent, in seconds since the Unix epoch."""
        self._first_came_at = 0.0
        self.sequencer = StepSequencer(state, self._grow_row)
        self._queue = state.queue
        self._scheduler = scheduler
        self._grant = grant
        self.sender = sender
        self.donor = donor
        self._receiver: TransferReceiver | None = receiver
        self._transfer_lock = asyncio.Lock()
        self._emit_lock = asyncio.Lock()
        self._state_changed = asyncio.Condition()
        self._num_waiters = 0
        """Tasks that wait for `_state_changed`."""
        self._early_pushes = 0
        self._upstream_task: asyncio.Task[None] | None = None
        self._upstream_stream: Stream | None = None
        self._num_checking = 0
        self._disclosures = 0
        self._closed = False

    @property
    def max_transfer_bytes(self) -> int:
        """The largest tensor that a donor may send, whatever its own cache holds."""
        blocks = self.state.blocks
        return max(
            blocks.full_cache_bytes_per_token * TRANSFER_CHUNK_TOKENS,
            blocks.cache_bytes_per_token * TRANSFER_CHUNK_TOKENS,
            self.sequencer.max_step_bytes,
        )

    @property
    def is_busy(self) -> bool:
        return self._num_checking > 0 or self._queue.backlog > 0 or self._emit_lock.locked()

    @property
    def last_pushed_step(self) -> int:
        """The last step of this epoch that was begun to be pushed; -1 without one."""
        epoch, step = self.sender.last_pushed
        return step if epoch == self.state.epoch else -1

    @property
    def upstream_bytes(self) -> int:
        """Bytes received on the stream from the upstream node."""
        return 0 if self._upstream_stream is None else self._upstream_stream.raw_bytes_received

    async def submit(self, sender: PeerId, step: Step, payload: bytearray) -> None:
        """Check and queue a step from `sender`; waits while the queue is full.

        Raises `ProtocolError` without changing the session. Calls of one sender must not overlap,
        or steps could overtake each other.
        """
        self.active_at = time.monotonic()
        if sender != (self.upstream or self.client.peer):
            raise ProtocolError("not_upstream", f"{sender} is not upstream of this session")
        self._require_linked()
        if self._closed or self._queue.backlog >= MAX_QUEUED_STEPS:
            await self._wait_until(lambda: self._queue.backlog < MAX_QUEUED_STEPS)
        self._num_checking += 1
        try:
            content = await content_key(payload)
            if not self.sequencer.needs_decoding(step, content):
                return
            hidden = await decode_step(step, payload)
        finally:
            self._num_checking -= 1
        self._require_open()
        self.sender.client_wire.count_received(step.tensor, payload)
        if not self._first_came_at:
            self._first_came_at = time.time()
        if self.sequencer.accept(step, content):
            self._scheduler.submit(self._queue, step, hidden)
            await self._emit_inline()

    async def rollback(self, epoch: int, lengths: Sequence[int]) -> None:
        """Begin an epoch with the caches truncated to `lengths`. Raises `ProtocolError`."""
        self._require_linked()
        self.active_at = time.monotonic()
        self.state.begin_epoch(epoch, lengths)
        async with self._changing_caches(partial(self._truncate, lengths)):
            pass

    async def link(self, link: Link) -> None:
        """Take new neighbours, truncate the caches, and replay what the downstream lacks.

        Returns when everything is sent. Raises `ProtocolError("downstream_lost")` if it cannot be.
        """
        self._check_link(link)
        # Before any step the first link can only cut reused prefix pages: the announced digests
        # still describe the tokens that follow.
        as_announced = self.state.epoch == self.opened.epoch
        async with self._transfer_lock:
            self.active_at = time.monotonic()
            self.state.begin_epoch(link.epoch, link.lengths)
            self._receiver = None
        self.sender.abort_other_than(link.downstream)
        self.upstream = PeerId(link.upstream) if link.upstream else None
        # In a star a node cannot see its position: the first blocks are the likely entry hop.
        first = self.opened.mode == "chain" or self.state.blocks.span.start == 0
        self._queue.is_entry_hop = first and self.upstream is None
        cut = partial(self._truncate, link.lengths, as_announced=as_announced)
        async with self._changing_caches(cut):
            await self.sender.link(link.downstream, link.epoch, link.emit_from)

    async def reorder(self, epoch: int, sources: Sequence[int]) -> None:
        """Begin an epoch in which each row continues as a copy of row `sources[row]`.

        Raises `ProtocolError`, also while steps are queued.
        """
        self._require_linked()
        rows, lengths = len(self.state.tables), self.state.lengths
        if len(sources) != rows or max(sources) >= rows:
            raise ProtocolError("bad_rows", f"{len(sources)} sources for {rows} rows")
        if self.state.expected_positions != lengths:
            raise ProtocolError("bad_position", "steps are under way")
        self.sequencer.reserve_reordered(sources)
        self.active_at = time.monotonic()
        self.state.begin_epoch(epoch, lengths, sources)
        async with self._changing_caches(partial(self._reorder, sources)):
            pass

    async def hand_over(self, to: Downstream) -> tuple[int, ...]:
        """Send `to` what it lacks and return the lengths it holds. Raises `ProtocolError`."""
        self.active_at = time.monotonic()
        self._require_linked()
        lengths = await self.donor.sync(to)
        log.info("session_handed_over", peer=to.peer, lengths=lengths)
        return lengths

    async def seal(self) -> None:
        """Send the client a seal of what its rows hold. Raises `ProtocolError` for old clients."""
        self._require_sealed()
        async with self._emit_lock:
            await self.client.send(self.state.sealer.make_seal(self.state.epoch, requested=True))

    async def disclose(self, rows: Sequence[RowSlice]) -> None:
        """Send the client the outputs that were kept of `rows`. Raises `ProtocolError`."""
        self._require_sealed()
        if self._disclosures == MAX_DISCLOSURES:
            raise ProtocolError(
                "not_kept", f"outputs are disclosed {MAX_DISCLOSURES} times at most"
            )
        self._disclosures += 1
        self.active_at = time.monotonic()
        await self.sender.disclose(rows)

    def _require_sealed(self) -> None:
        if self.opened.version < SEALED_SINCE:
            raise ProtocolError("unexpected", "this session was opened without seals")

    def check_donor(self, peer: PeerId) -> None:
        """Raises `ProtocolError` unless `peer` may fill the session now."""
        if self.opened.donor != peer:
            raise ProtocolError("not_donor", f"{peer} is not the donor of this session")
        self._require_unlinked()

    async def accept_transfer(
        self, message: Pages | QuantizedPages | Step | Sync, payload: bytearray
    ) -> tuple[int, ...]:
        """Take what the donor sends; return the lengths held. Not once linked (`ProtocolError`)."""
        async with self._transfer_lock:
            self._require_open()
            await self._require_unlinked().receive(message, payload)
        return self.state.lengths

    async def wait_for_epoch(self, epoch: int) -> None:
        """Wait until the client begins `epoch`: an upstream may be linked or rolled back, and push,
        before the `link` or `rollback` arrives here.

        Raises `ProtocolError("future_epoch")` after `NEIGHBOUR_TIMEOUT_S`, and at once if
        `MAX_EARLY_PUSHES` wait already, since the pipe of each holds what arrives meanwhile.
        """
        if self.state.epoch < epoch and self._early_pushes >= MAX_EARLY_PUSHES:
            raise ProtocolError("future_epoch", f"{MAX_EARLY_PUSHES} pushes wait already")
        self._early_pushes += 1
        try:
            async with asyncio.timeout(NEIGHBOUR_TIMEOUT_S):
                await self._wait_until(lambda: self.state.epoch >= epoch)
        except TimeoutError:
            raise ProtocolError(
                "future_epoch",
                f"the client did not begin epoch {epoch} within {NEIGHBOUR_TIMEOUT_S:g} s",
            ) from None
        finally:
            self._early_pushes -= 1

    @contextmanager
    def reading_upstream(self, stream: Stream) -> Iterator[None]:
        """Register the task that reads the upstream's `stream`; the session's end or a later stream
        cancels it.

        Otherwise an upstream could make this node hold one step per stream, and the memory of an
        ended session.
        """
        self._require_open()
        if self._upstream_task is not None:
            self._upstream_task.cancel()
        task = self._upstream_task = asyncio.current_task()
        self._upstream_stream = stream
        try:
            yield
        finally:
            if self._upstream_task is task:
                self._upstream_task = self._upstream_stream = None

    async def run(self) -> None:
        """Emit outputs until cancelled. Raises `ProtocolError` if a step could not be run."""
        while True:
            await self._queue.wait_for_output()
            await self._emit_next()

    async def close(self) -> None:
        """Accept no more steps, and return when no iteration uses the caches.

        Also ends a donor's transfer. Completes even when cancelled.
        """
        self._closed = True
        if self._upstream_task is not None:
            self._upstream_task.cancel()
        # References to this object hold no memory.
        self.state.replay_buffer = ReplayBuffer()
        letting_go = asyncio.create_task(self._release())
        await wait_until_done(letting_go)
        letting_go.result()

    async def _release(self) -> None:
        await self._notify()
        async with self._transfer_lock:
            self._receiver = None
        self._queue.clear_and_pause()
        await self._queue.wait_until_idle()

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`. Raises `ProtocolError` if the session ends first."""
        self._require_open()
        if not condition():
            self._num_waiters += 1
            try:
                async with self._state_changed:
                    await self._state_changed.wait_for(lambda: self._closed or condition())
            finally:
                self._num_waiters -= 1
            self._require_open()

    async def _emit_inline(self) -> None:
        """Send an output that was computed inline: waking the worker would take longer."""
        # Only what needs no waiting: the caller has other messages to read.
        output_bytes = self._queue.next_output_bytes
        small = output_bytes is not None and output_bytes <= MAX_INLINE_OUTPUT_BYTES
        if not small or self._emit_lock.locked() or not self.sender.is_writable:
            self._queue.wake_receiver()
            return
        try:
            await self._emit_next()
        except ProtocolError as error:
            self._queue.append_error(error)
        finally:
            self._queue.wake_receiver()

    async def _emit_next(self) -> None:
        async with self._emit_lock:
            result = self._queue.take_output()
            # A task that began a new epoch is waiting to truncate this step; it must not be sent.
            if result is not None and result.step.epoch == self.state.epoch:
                self.state.publish_prefix()
                self.sender.decoding = max(result.step.decoding, self._scheduler.count_decoding())
                await self.sender.emit(result)
                self.emitted_steps += 1
                if self.first_step_times is None:
                    self.first_step_times = self._first_came_at, time.time()
                if self.state.sealer.is_due:
                    await self.client.send(self.state.sealer.make_seal(self.state.epoch))
        self.active_at = time.monotonic()
        await self._notify()

    async def _notify(self) -> None:
        if self._num_waiters:
            async with self._state_changed:
                self._state_changed.notify_all()

    def _require_linked(self) -> None:
        if self._receiver is not None and self.opened.donor is not None:
            # While a donor fills the caches no other task may use or change them: pages freed by a
            # rollback could belong to another session when the donor's data is written there.
            raise ProtocolError("not_linked", "a session that is handed over begins with `link`")

    def _require_unlinked(self) -> TransferReceiver:
        if self._receiver is None:
            raise ProtocolError("unexpected", "the session is already linked here")
        return self._receiver

    def _require_open(self) -> None:
        if self._closed:
            raise ProtocolError("unknown_session", "the session has ended")

    def _grow_row(self, have: int, want: int) -> None:
        """Reserve `want` tokens for a row that has `have`. Raises `ProtocolError`."""
        limit = self.state.blocks.context_length
        if want > limit:
            raise ProtocolError("context_length", f"{want} tokens; the model holds {limit}")
        self._grant.grow_row(have, want)

    def _check_link(self, link: Link) -> None:
        if len(link.emit_from) != len(link.lengths):
            raise ProtocolError("bad_rows", "`emit_from` and `lengths` must have one entry a row")
        downstream, span = link.downstream, self.state.blocks.span
        if downstream is None:
            return
        if self.opened.mode == "star":
            raise ProtocolError("bad_link", "a star session has no downstream")
        if not span.end == downstream.blocks[0] < downstream.blocks[1]:
            # This also makes a cycle impossible: block numbers only rise along a chain.
            raise ProtocolError("bad_link", f"blocks {downstream.blocks} do not follow {span}")

    @asynccontextmanager
    async def _changing_caches(self, change: Callable[[], None]) -> AsyncIterator[None]:
        """Change the caches while no iteration uses them.

        Inside, no output is emitted, while steps of the new epoch already run.
        """
        await self._notify()
        async with self._emit_lock:
            try:
                await self._queue.wait_until_idle()
                change()
            finally:
                self._scheduler.resume(self._queue)
            yield

    def _reorder(self, sources: Sequence[int]) -> None:
        self.state.reorder(sources)
        self.donor.truncate([0] * len(sources))

    def _truncate(self, lengths: Sequence[int], *, as_announced: bool = False) -> None:
        self.state.require_held(lengths)
        self.state.truncate(lengths, as_announced=as_announced)
        self.donor.truncate(lengths)
