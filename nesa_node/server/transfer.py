"""Hand-over of a session to another node: the cache, and the outputs kept for replay.

The donor sends what its successor lacks as often as it is asked: once in bulk while the session
continues, and the small rest when it moves. L tokens of one row, H heads, D head size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from nesa_node.compression import tensors
from nesa_node.core.errors import NesaError, ProtocolError
from nesa_node.engine.pages import PageTable
from nesa_node.server.executor import Executor
from nesa_node.server.inbox import examine
from nesa_node.server.outlet import Outlet
from nesa_node.server.work import Work
from nesa_node.swarm.messages import Downstream, Error, Pages, Step, Sync, Synced
from nesa_node.swarm.outbox import Held, Kept
from nesa_node.swarm.stream import Stream, silence_is_loss
from nesa_node.swarm.wire import PLAIN, check_allowed

CHUNK_TOKENS = 128
SILENCE_S = 30.0


MAX_CUTS = 4
"""Most truncations during one hand-over, after each of which the rest is sent. Beam search
truncates a session with every step."""


class Transfer:
    """The donor's side of one hand-over. Only one task at a time may `sync`."""

    def __init__(
        self, stream: Stream, session: bytes, work: Work, outlet: Outlet, executor: Executor
    ) -> None:
        self._stream = stream
        self._session = session
        self._work = work
        self._outlet = outlet
        self._executor = executor
        self._sent = [0] * len(work.tables)
        self._kept_sent = [0] * len(work.tables)
        self._cuts = 0
        self._is_cut = True
        """Whether the successor may hold more than `_sent`, also from an earlier transfer."""

    def truncate(self, lengths: Sequence[int]) -> None:
        """Note that the session was truncated; the next sync truncates the successor."""
        self._cuts += 1
        self._is_cut = True
        for sent in (self._sent, self._kept_sent):
            sent[:] = [min(pair) for pair in zip(sent, lengths, strict=True)]

    async def sync(self) -> tuple[int, ...]:
        """Send what the successor lacks and return the lengths that it then holds.

        Raises `ProtocolError("downstream_lost")` if it is lost or refuses.
        """
        try:
            async with silence_is_loss(self._stream.peer, SILENCE_S, "taking over a session"):
                await self._send_all()
                return await self._ask(tuple(self._sent))
        except NesaError as error:
            raise ProtocolError("downstream_lost", str(error)) from error

    async def close(self) -> None:
        await self._stream.close()

    async def _send_all(self) -> None:
        for _ in range(MAX_CUTS):
            cuts = self._cuts
            if self._is_cut:
                self._is_cut = False
                await self._ask(tuple(self._sent))
            for row in range(len(self._sent)):
                await self._send_row(row, cuts)
            for held in self._outlet.kept(self._kept_sent, tuple(self._sent)):
                # A successor that takes each output at once would otherwise block the event loop.
                await asyncio.sleep(0)
                if self._cuts != cuts:
                    break
                await self._send_kept(held, cuts)
            if self._cuts == cuts:
                return
        # Truncations outpace the transfer. Pages without their kept outputs are of no use.
        self.truncate([0] * len(self._sent))

    async def _ask(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        await self._stream.send(Sync(lengths=lengths))
        answer, _ = await self._stream.receive()
        if isinstance(answer, Synced):
            return answer.lengths
        words = answer.message if isinstance(answer, Error) else type(answer).__name__
        raise ProtocolError("downstream_lost", f"{self._stream.peer} answered: {words}")

    async def _send_row(self, row: int, cuts: int) -> None:
        table = self._work.tables[row]
        while self._cuts == cuts and (start := self._sent[row]) < (length := table.length):
            end = min(start + CHUNK_TOKENS, length)
            tokens = await self._executor.run(partial(self._export, table, start, end))
            if self._cuts != cuts:
                # Another session may have owned these pages while they were read.
                return
            meta, payload = tensors.encode(tokens)
            self._sent[row] = end  # set before the send: a truncation meanwhile lowers it
            await self._stream.send(Pages(row=row, position=start, tensor=meta), payload)

    def _export(self, table: PageTable, start: int, end: int) -> Tensor:
        # Slots are looked up on the device's thread: an earlier iteration may have replaced a page.
        slots = table.slots(start, end)
        return table.pool.export_tokens(slots, self._work.blocks.span)

    async def _send_kept(self, held: Held, cuts: int) -> None:
        kept = await held.copied()
        if self._cuts != cuts:
            return
        for part in kept.rows:
            self._kept_sent[part.row] = part.position + part.count
        await self._stream.send(
            Step(
                session=self._session,
                epoch=0,
                step=kept.step,
                rows=kept.rows,
                tensor=kept.meta,
                want=kept.want,
                via=kept.via,
            ),
            kept.payload,
        )


class Succession:
    """The successor's side: fills an empty session before its client links it."""

    def __init__(
        self, work: Work, outlet: Outlet, executor: Executor, max_tokens: int, quality: str
    ) -> None:
        self._quality = quality
        self._work = work
        self._outlet = outlet
        self._executor = executor
        self._max_tokens = max_tokens
        self._kept: list[range | None] = [None] * len(work.tables)
        """Range of tokens per row for which outputs arrived. The donor kept none for tokens of its
        prefix."""

    async def take(self, message: Pages | Step | Sync, payload: bytearray) -> None:
        """Apply one message. Raises `ProtocolError` for what does not fit the session."""
        match message:
            case Pages():
                await self._take_pages(message, payload)
            case Step():
                await self._take_output(message, payload)
            case Sync():
                self._cut(message.lengths)

    async def _take_pages(self, pages: Pages, payload: bytearray) -> None:
        """Append pages to a row."""
        if pages.row >= len(self._work.tables):
            raise ProtocolError("bad_rows", f"row {pages.row} does not exist")
        table, blocks = self._work.tables[pages.row], self._work.blocks
        heads, count = table.pool.heads, (pages.tensor.shape or (0, 0))[1:2]
        shape = (2 * len(blocks.span), *count, heads.count, heads.dim)
        dtype = tensors.DTYPE_NAMES[blocks.dtype]
        found = (pages.tensor.dtype, pages.tensor.shape, pages.tensor.codec)
        # An empty message would still take a turn of the device's thread.
        if found != (dtype, shape, PLAIN) or count[0] < 1:
            raise ProtocolError(
                "bad_tensor",
                f"expected {dtype}{list(shape)}, got {pages.tensor.dtype}"
                f"{list(pages.tensor.shape)} as {pages.tensor.codec[:32]!r}",
            )
        end = pages.position + shape[1]
        if pages.position != table.length or end > self._max_tokens:
            raise ProtocolError("bad_position", f"row {pages.row} continues at {table.length}")
        table.reserve(end)
        await self._executor.run(partial(self._put, pages, payload, table.slots(table.length, end)))
        table.length = end

    async def _take_output(self, step: Step, payload: bytearray) -> None:
        """Store an output that the donor kept, for a receiver that lacks it."""
        self._check_output(step)
        # A receiver would blame this node for values that are not finite.
        await examine(step, payload)
        for part in step.rows:
            kept = self._kept[part.row] or range(part.position, part.position)
            self._kept[part.row] = range(kept.start, part.position + part.count)
        self._outlet.keep(Kept(step.step, step.rows, step.want, step.tensor, payload, step.via))

    def _check_output(self, step: Step) -> None:
        check_allowed(self._quality, step.tensor)
        rows = {part.row for part in step.rows}
        if len(rows) < len(step.rows) or max(rows) >= len(self._kept):
            raise ProtocolError("bad_rows", f"a kept output of rows {sorted(rows)}")
        for part in step.rows:
            kept = self._kept[part.row] or range(part.position, part.position)
            if part.position != kept.stop or part.position + part.count > self._max_tokens:
                raise ProtocolError("bad_position", f"a kept output of {part}")
        total = sum(part.count for part in step.rows)
        dtype, shape = tensors.DTYPE_NAMES[self._work.dtype], (total, self._work.blocks.hidden_size)
        if (step.tensor.dtype, step.tensor.shape) != (dtype, shape):
            raise ProtocolError(
                "bad_tensor",
                f"expected {dtype}{list(shape)}, got {step.tensor.dtype}{list(step.tensor.shape)}",
            )

    def _cut(self, lengths: Sequence[int]) -> None:
        if len(lengths) != len(self._work.tables):
            raise ProtocolError("bad_rows", f"{len(lengths)} lengths")
        for table, length in zip(self._work.tables, lengths, strict=True):
            table.truncate(min(table.length, length))
        self._kept = [
            kept and range(kept.start, min(kept.stop, length))
            for kept, length in zip(self._kept, lengths, strict=True)
        ]
        self._outlet.truncate(lengths)

    def _put(self, pages: Pages, payload: bytearray, slots: slice | torch.Tensor) -> None:
        tokens = tensors.decode(pages.tensor, payload, max_bytes=pages.tensor.most_nbytes)
        self._work.tables[pages.row].pool.import_tokens(slots, self._work.blocks.span, tokens)


class Transfers:
    """Hands a session to one successor at a time; the stream stays open for later syncs."""

    def __init__(
        self,
        dial: Callable[[Downstream], Awaitable[Stream]],
        session: bytes,
        work: Work,
        outlet: Outlet,
        executor: Executor,
    ) -> None:
        self._dial = dial
        self._parts = (session, work, outlet, executor)
        self._blocks = work.blocks.span
        self._to: Downstream | None = None
        self._transfer: Transfer | None = None
        self._busy = False

    @property
    def busy(self) -> bool:
        """Whether a sync is in progress."""
        return self._busy

    async def sync(self, to: Downstream) -> tuple[int, ...]:
        """Send `to` what it lacks and return the lengths that it then holds. Raises
        `ProtocolError`.
        """
        if to.blocks != (self._blocks.start, self._blocks.end):
            raise ProtocolError("bad_link", f"blocks {to.blocks} are not {self._blocks}")
        if self._busy:
            raise ProtocolError("unexpected", "the session is being handed over already")
        self._busy = True
        try:
            if self._transfer is None or to != self._to:
                await self.close()
                self._to, self._transfer = to, Transfer(await self._dial(to), *self._parts)
            return await self._transfer.sync()
        except ProtocolError:
            await self.close()
            raise
        finally:
            self._busy = False

    def truncate(self, lengths: Sequence[int]) -> None:
        """Record that the session was truncated to `lengths`."""
        if self._transfer is not None:
            self._transfer.truncate(lengths)

    async def close(self) -> None:
        """Close the stream. May be called twice."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            await transfer.close()
