"""One client's session on this node: its caches, its neighbours, its worker.

T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial

import structlog
import torch

from nesa_node.compression import tensors
from nesa_node.core.errors import ProtocolError, StreamClosedError
from nesa_node.core.ids import PeerId
from nesa_node.engine.blocks import Blocks, Run
from nesa_node.engine.pages import PAGE_TOKENS, pages_for
from nesa_node.server.batch import Batch, RowChunk
from nesa_node.server.executor import Executor
from nesa_node.server.inbox import Inbox, Queued
from nesa_node.server.push import Push, open_push
from nesa_node.swarm.messages import Downstream, Error, Link, Open, Output, Step
from nesa_node.swarm.outbox import Kept, Outbox, clip
from nesa_node.swarm.stream import Stream

log = structlog.get_logger(__name__)

MAX_QUEUED_STEPS = 64
MAX_BATCH_TOKENS = 1024
"""Queued steps of a replay are run together up to this many tokens."""

Dial = Callable[["Session", Downstream], Awaitable[Stream]]


class Session:
    """State and worker. Every method runs on the event loop; `run` is the session's worker task.

    The caches belong to whoever holds `_computing`: the worker while it computes and emits, or a
    change of epoch while it cuts them.
    """

    def __init__(
        self, opened: Open, client: Stream, blocks: Blocks, executor: Executor, dial: Dial
    ) -> None:
        self.opened = opened
        self.client = client
        self.upstream: PeerId | None = PeerId(opened.upstream) if opened.upstream else None
        self.active_at = time.monotonic()
        self.inbox = Inbox(
            session=opened.session,
            rows=opened.rows,
            max_tokens=opened.max_tokens,
            hidden_size=blocks.hidden_size,
            dtype=opened.dtype,
        )
        self.inbox.epoch = opened.epoch
        self._blocks = blocks
        pages = opened.rows * pages_for(opened.max_tokens)
        promise = blocks.new_pool(pages * PAGE_TOKENS).promise(pages)
        self._caches = [promise.new_table() for _ in range(opened.rows)]
        self._executor = executor
        self._dial = dial
        self._outbox = Outbox()
        self._computing = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._downstream: Downstream | None = None
        self._emit_from: Sequence[int] = [0] * opened.rows
        self._push: Push | None = None
        self._push_scope = AsyncExitStack()
        self._pushed: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(cache.length for cache in self._caches)

    @property
    def busy(self) -> bool:
        return bool(self.inbox.queue) or self._computing.locked()

    async def submit(self, sender: PeerId, step: Step, payload: bytearray) -> None:
        """Check and queue a step that `sender` brought; waits while the queue is full.

        Raises `ProtocolError`, after which the session is as it was.
        """
        self.active_at = time.monotonic()
        if sender != (self.upstream or self.client.peer):
            raise ProtocolError("not_upstream", f"{sender} is not upstream of this session")
        async with self._changed:
            await self._wait_until(lambda: len(self.inbox.queue) < MAX_QUEUED_STEPS)
            if self.inbox.accept(step, payload):
                self._changed.notify_all()

    async def rollback(self, epoch: int, lengths: Sequence[int]) -> None:
        """Begin an epoch with the caches cut to `lengths`. Raises `ProtocolError`."""
        self.active_at = time.monotonic()
        await self._begin_epoch(epoch, lengths)
        async with self._computing:
            self._cut(lengths)
            self._emit_from = [min(pair) for pair in zip(self._emit_from, lengths, strict=True)]

    async def link(self, link: Link) -> None:
        """Take new neighbours, cut the caches, and send the downstream what it lacks.

        Returns when all of it is sent. Raises `ProtocolError("downstream_lost")` if it cannot be.
        """
        self.active_at = time.monotonic()
        self._check_link(link)
        await self._begin_epoch(link.epoch, link.lengths)
        self.upstream = PeerId(link.upstream) if link.upstream else None
        async with self._computing:
            self._cut(link.lengths)
            self._emit_from = link.emit_from
            await self._connect(link.downstream)
            for kept in self._outbox.since(link.emit_from, link.lengths):
                await self._send(kept, link.epoch)

    async def wait_for_epoch(self, epoch: int) -> None:
        async with self._changed:
            await self._wait_until(lambda: self.inbox.epoch >= epoch)

    @contextmanager
    def being_pushed(self) -> Iterator[None]:
        """Around the task that reads the upstream's stream: the session's end cancels it.

        So does a later one. Else an upstream could make this node hold a step per stream, and the
        memory of a session whose room has been given to others.
        """
        if self._closed:
            raise ProtocolError("unknown_session", "the session has ended")
        if self._pushed is not None:
            self._pushed.cancel()
        task = self._pushed = asyncio.current_task()
        try:
            yield
        finally:
            if self._pushed is task:
                self._pushed = None

    async def run(self) -> None:
        """Compute and emit steps until cancelled."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: bool(self.inbox.queue))
            async with self._computing:
                epoch = self.inbox.epoch
                steps = self.inbox.take(MAX_BATCH_TOKENS)
                async with self._changed:
                    self._changed.notify_all()
                outputs = await self._compute(steps, epoch)
                for queued, output_TD in zip(steps, outputs, strict=False):
                    await self._emit(queued.message, output_TD, epoch)
            self.active_at = time.monotonic()

    async def close(self) -> None:
        """Let go of the neighbours' streams, and of what admission takes for free from now on."""
        self._closed = True
        if self._pushed is not None:
            self._pushed.cancel()
        async with self._changed:
            self._changed.notify_all()
        await self._push_scope.aclose()
        # Whoever still knows this object must not keep its memory.
        self._caches.clear()
        self._outbox = Outbox()
        self.inbox.queue.clear()

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        """With `_changed` held. Raises `ProtocolError` if the session ends first."""
        await self._changed.wait_for(lambda: self._closed or condition())
        if self._closed:
            raise ProtocolError("unknown_session", "the session has ended")

    def _check_link(self, link: Link) -> None:
        if len(link.emit_from) != len(link.lengths):
            raise ProtocolError("bad_rows", "`emit_from` and `lengths` must have one entry a row")
        downstream = link.downstream
        if downstream is None:
            return
        if self.opened.mode == "star":
            raise ProtocolError("bad_link", "a star session has no downstream")
        start, end = downstream.blocks
        if start != self._blocks.span.end or start >= end:
            # Also what makes a cycle impossible: blocks only ever rise along a chain.
            raise ProtocolError(
                "bad_link", f"blocks {downstream.blocks} do not follow {self._blocks.span}"
            )

    async def _begin_epoch(self, epoch: int, lengths: Sequence[int]) -> None:
        async with self._changed:
            self.inbox.begin_epoch(epoch, lengths)
            self._changed.notify_all()

    def _cut(self, lengths: Sequence[int]) -> None:
        if any(length > cache.length for cache, length in zip(self._caches, lengths, strict=True)):
            self.inbox.expected = list(self.lengths)
            raise ProtocolError(
                "bad_position", f"asked to keep {list(lengths)} of {list(self.lengths)} tokens"
            )
        for cache, length in zip(self._caches, lengths, strict=True):
            cache.truncate(length)
        self._outbox.truncate(lengths)

    async def _compute(self, steps: Sequence[Queued], epoch: int) -> list[torch.Tensor]:
        """Outputs of the steps, in order; none where a newer epoch overtook them."""
        batch = Batch([(queued.message.rows, queued.hidden_TD) for queued in steps])
        for job in batch.jobs:
            batch.done(job, await self._executor.run(partial(self._forward, job)))
            if self.inbox.epoch != epoch:
                return []
        return batch.results()

    def _forward(self, job: Sequence[RowChunk]) -> list[torch.Tensor]:
        """Runs on the device's thread. Outputs [L, D] on the CPU in the wire's dtype."""
        blocks, dtype = self._blocks, tensors.DTYPES[self.opened.dtype]
        outputs = []
        for chunk in job:
            hidden_LD = chunk.hidden_LD.to(device=blocks.device, dtype=blocks.dtype)
            table = self._caches[chunk.row]
            table.reserve(table.length + len(hidden_LD))
            output_LD = blocks.forward(hidden_LD, [Run(table, len(hidden_LD))])
            outputs.append(output_LD.to(device="cpu", dtype=dtype))
        return outputs

    async def _emit(self, step: Step, output_TD: torch.Tensor, epoch: int) -> None:
        if self.inbox.epoch != epoch:
            # Whoever began the next epoch waits to cut this step away; nobody expects it any more.
            return
        meta, payload = tensors.encode(output_TD)
        kept = Kept(step.step, step.rows, step.want, meta, payload)
        if self._downstream is not None:
            self._outbox.append(kept)
        await self._send(kept, epoch)

    async def _send(self, kept: Kept, epoch: int) -> None:
        """Send the part of a step that its receiver lacks."""
        end = [self.opened.max_tokens] * len(self._caches)
        part = clip(kept, self._emit_from, end)
        if part is None:
            return
        if self._downstream is None:
            await self._answer(part, epoch)
        elif self._push is not None:
            await self._push.send(
                Step(
                    session=self.opened.session,
                    epoch=epoch,
                    step=part.step,
                    rows=part.rows,
                    tensor=part.meta,
                    want=part.want,
                ),
                part.payload,
            )

    async def _answer(self, kept: Kept, epoch: int) -> None:
        meta, payload = kept.meta, kept.payload
        if kept.want == "last":
            ends = torch.tensor([part.count for part in kept.rows]).cumsum(0) - 1
            meta, payload = tensors.encode(kept.tensor()[ends], codec=meta.codec)
        elif kept.want == "none":
            meta, payload = tensors.encode(kept.tensor()[:0], codec=meta.codec)
        await self.client.send(
            Output(epoch=epoch, step=kept.step, rows=kept.rows, tensor=meta), payload
        )

    async def _tell_lost(self, peer: str, reason: str) -> None:
        """What is computed from now on is only kept, until the client names a replacement."""
        try:
            await self.client.send(
                Error(code="downstream_lost", message=reason, fatal=False, peer=peer)
            )
        except StreamClosedError:
            log.debug("client_gone_too", peer=self.client.peer)

    async def _connect(self, downstream: Downstream | None) -> None:
        """Hand outputs to `downstream` from now on; keep the stream if it is the same and lives."""
        alive = self._push is not None and not self._push.lost
        if downstream == self._downstream and (alive or downstream is None):
            return
        self._downstream = downstream
        self._push = None
        await self._push_scope.aclose()
        if downstream is not None:
            stream = await self._dial(self, downstream)
            self._push = await self._push_scope.enter_async_context(
                open_push(stream, partial(self._tell_lost, downstream.peer))
            )
