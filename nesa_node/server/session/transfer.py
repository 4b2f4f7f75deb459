"""Hand-over of a session to another node: the cache, and the outputs kept for replay.

The donor sends what its successor lacks as often as it is asked: once in bulk while the session
continues, and the small rest when it moves. Between two caches in int8 that is what they hold; else
values in the blocks' dtype, which a cache in int8 quantizes. A cache in int8 gives nothing to
another one, whose node would answer for rounded values as if they were its own: that is replayed
to. L tokens of one row, H heads, D head size, B bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from nesa_node.compression import tensors
from nesa_node.compression.codecs import UNCOMPRESSED
from nesa_node.core.errors import NesaError, ProtocolError
from nesa_node.engine.cache.pages import PageTable
from nesa_node.server.scheduler.batch import Executor
from nesa_node.server.session.session_state import SessionState, decode_step
from nesa_node.swarm.protocol.link_encoder import check_codec_allowed
from nesa_node.swarm.protocol.messages import (
    Downstream,
    ErrorMessage,
    Pages,
    QuantizedPages,
    RowSlice,
    Step,
    Sync,
    Synced,
    TransferOpened,
)
from nesa_node.swarm.protocol.replay_buffer import ReplaySlice, SentStep
from nesa_node.swarm.protocol.stream import Stream, peer_timeout

TRANSFER_CHUNK_TOKENS = 128
TRANSFER_TIMEOUT_S = 30.0


MAX_TRUNCATIONS = 4
"""Most truncations during one hand-over, after each of which the rest is sent, that leave no more
in place than there was before. Beam search truncates a session with every step, to nothing;
speculation nearly so, by a few tokens."""


class TransferSender:
    """The donor's side of one hand-over. Only one task at a time may `sync`."""

    def __init__(
        self, stream: Stream, state: SessionState, executor: Executor, to: TransferOpened
    ) -> None:
        """`to` says what the successor's cache holds."""
        self.stream = stream
        self._state = state
        self._has_codes = state.blocks.cache_dtype == "int8"
        self._is_possible = not self._has_codes or to.cache_dtype == "int8"
        self._executor = executor
        self._sent = [0] * len(state.tables)
        self._outputs_sent = [0] * len(state.tables)
        self._truncations = 0
        self._must_truncate = True
        """Whether the successor may hold more than `_sent`, also from an earlier transfer."""

    def truncate(self, lengths: Sequence[int]) -> None:
        """Note that the session was truncated; the next sync truncates the successor."""
        self._truncations += 1
        self._must_truncate = True
        for sent in (self._sent, self._outputs_sent):
            sent[:] = [min(pair) for pair in zip(sent, lengths, strict=True)]

    async def sync(self) -> tuple[int, ...]:
        """Send what the successor lacks and return the lengths that it then holds.

        Raises `ProtocolError("downstream_lost")` if it is lost or refuses.
        """
        try:
            async with peer_timeout(self.stream.peer, TRANSFER_TIMEOUT_S, "taking over a session"):
                if self._is_possible:
                    await self._send_all()
                return await self._sync_lengths(tuple(self._sent))
        except NesaError as error:
            raise ProtocolError("downstream_lost", str(error)) from error

    async def _send_all(self) -> None:
        most, in_vain = 0, 0
        while in_vain < MAX_TRUNCATIONS:
            truncations = self._truncations
            if self._must_truncate:
                self._must_truncate = False
                await self._sync_lengths(tuple(self._sent))
            for row in range(len(self._sent)):
                await self._send_row(row, truncations)
            outputs = self._state.replay_buffer.iter_steps(self._outputs_sent, tuple(self._sent))
            for held in outputs:
                # A successor that takes each output at once would otherwise block the event loop.
                await asyncio.sleep(0)
                if self._truncations != truncations:
                    break
                await self._send_output(held, truncations)
            if self._truncations == truncations:
                return
            in_place = sum(self._sent) + sum(self._outputs_sent)
            most, in_vain = (in_place, 1) if in_place > most else (most, in_vain + 1)
        # Truncations outpace the transfer. Pages without their kept outputs are of no use.
        self.truncate([0] * len(self._sent))

    async def _sync_lengths(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        await self.stream.send(Sync(lengths=lengths))
        answer, _ = await self.stream.receive()
        if isinstance(answer, Synced):
            return answer.lengths
        words = answer.message if isinstance(answer, ErrorMessage) else type(answer).__name__
        raise ProtocolError("downstream_lost", f"{self.stream.peer} answered: {words}")

    async def _send_row(self, row: int, truncations: int) -> None:
        table = self._state.tables[row]
        while self._truncations == truncations and (start := self._sent[row]) < (
            length := table.length
        ):
            end = min(start + TRANSFER_CHUNK_TOKENS, length)
            tokens = await self._executor.run(partial(self._export, table, start, end))
            if self._truncations != truncations:
                # Another session may have owned these pages while they were read.
                return
            pages, payload = self._make_pages(row, start, tokens)
            self._sent[row] = end  # set before the send: a truncation meanwhile lowers it
            await self.stream.send(pages, payload)

    def _make_pages(
        self, row: int, start: int, tokens: Tensor
    ) -> tuple[Pages | QuantizedPages, memoryview]:
        if self._has_codes:
            count, nbytes = len(tokens), tokens.nbytes
            pages = QuantizedPages(row=row, position=start, count=count, nbytes=nbytes)
            return pages, tokens.numpy().data
        meta, payload = tensors.encode(tokens)
        return Pages(row=row, position=start, tensor=meta), payload

    def _export(self, table: PageTable, start: int, end: int) -> Tensor:
        # Slots are looked up on the device's thread: an earlier iteration may have replaced a page.
        slots, pool = table.slots(start, end), table.pool
        export = pool.export_bytes if self._has_codes else pool.export_tokens
        return export(slots, self._state.blocks.span)

    async def _send_output(self, held: ReplaySlice, truncations: int) -> None:
        kept = await held.materialize()
        if self._truncations != truncations:
            return
        for row_slice in kept.rows:
            self._outputs_sent[row_slice.row] = row_slice.position + row_slice.count
        await self.stream.send(
            Step(
                session=self._state.opened.session,
                epoch=0,
                step=kept.step,
                rows=kept.rows,
                tensor=kept.meta,
                want=kept.want,
                via=kept.via,
            ),
            kept.payload,
        )


class TransferReceiver:
    """The successor's side: fills an empty session before its client links it."""

    def __init__(self, state: SessionState, executor: Executor) -> None:
        self._state = state
        self._executor = executor
        self._max_tokens = state.opened.max_tokens
        self._output_ranges: list[range | None] = [None] * len(state.tables)
        """Range of tokens per row for which outputs arrived. The donor kept none for tokens of its
        prefix."""

    async def receive(
        self, message: Pages | QuantizedPages | Step | Sync, payload: bytearray
    ) -> None:
        """Apply one message. Raises `ProtocolError` for what does not fit the session."""
        match message:
            case Pages() | QuantizedPages():
                await self._receive_pages(message, payload)
            case Step():
                await self._receive_output(message, payload)
            case Sync():
                self._truncate(message.lengths)

    async def _receive_pages(self, pages: Pages | QuantizedPages, payload: bytearray) -> None:
        """Append pages to a row."""
        if pages.row >= len(self._state.tables):
            raise ProtocolError("bad_rows", f"row {pages.row} does not exist")
        table = self._state.tables[pages.row]
        write: Callable[[slice | Tensor], None]
        if isinstance(pages, QuantizedPages):
            count, write = self._check_codes(pages), partial(self._import_codes, pages, payload)
        else:
            count, write = self._check_values(pages), partial(self._import_values, pages, payload)
        end = pages.position + count
        if pages.position != table.length or end > self._max_tokens:
            raise ProtocolError("bad_position", f"row {pages.row} continues at {table.length}")
        table.reserve(end)
        await self._executor.run(partial(write, table.slots(table.length, end)))
        table.length = end

    def _check_codes(self, pages: QuantizedPages) -> int:
        """The number of tokens. Raises `ProtocolError("bad_tensor")`."""
        pool, span = self._state.tables[pages.row].pool, self._state.blocks.span
        if pool.cache_dtype != "int8":
            raise ProtocolError("bad_tensor", "this node's cache is not in int8")
        needed = pages.count * pool.slot_bytes(span)
        if pages.nbytes != needed:
            raise ProtocolError(
                "bad_tensor", f"{pages.count} tokens take {needed} bytes, got {pages.nbytes}"
            )
        return pages.count

    def _check_values(self, pages: Pages) -> int:
        """The number of tokens. Raises `ProtocolError("bad_tensor")`."""
        blocks = self._state.blocks
        count = (*pages.tensor.shape, 0, 0)[1]
        shape = self._state.tables[pages.row].pool.export_shape(count, blocks.span)
        dtype = tensors.DTYPE_NAMES[blocks.dtype]
        found = (pages.tensor.dtype, pages.tensor.shape, pages.tensor.codec)
        # An empty message would still take a turn of the device's thread.
        if found != (dtype, shape, UNCOMPRESSED) or count < 1:
            raise ProtocolError(
                "bad_tensor",
                f"expected {dtype}{list(shape)}, got {pages.tensor.dtype}"
                f"{list(pages.tensor.shape)} as {pages.tensor.codec[:32]!r}",
            )
        return count

    async def _receive_output(self, step: Step, payload: bytearray) -> None:
        """Store an output that the donor kept, for a receiver that lacks it."""
        self._check_output(step)
        # A receiver would blame this node for values that are not finite.
        await decode_step(step, payload)
        for row_slice in step.rows:
            kept = self._stored_range(row_slice)
            end = row_slice.position + row_slice.count
            self._output_ranges[row_slice.row] = range(kept.start, end)
        self._state.store_output(
            SentStep(step.step, step.rows, step.want, step.tensor, payload, step.via)
        )

    def _stored_range(self, row_slice: RowSlice) -> range:
        """Range of the row's stored outputs; empty before the first."""
        position = row_slice.position
        return self._output_ranges[row_slice.row] or range(position, position)

    def _check_output(self, step: Step) -> None:
        check_codec_allowed(self._state.opened.quality, step.tensor)
        rows = {row_slice.row for row_slice in step.rows}
        if len(rows) < len(step.rows) or max(rows) >= len(self._output_ranges):
            raise ProtocolError("bad_rows", f"a kept output of rows {sorted(rows)}")
        for row_slice in step.rows:
            kept = self._stored_range(row_slice)
            end = row_slice.position + row_slice.count
            if row_slice.position != kept.stop or end > self._max_tokens:
                raise ProtocolError("bad_position", f"a kept output of {row_slice}")
        total = sum(row_slice.count for row_slice in step.rows)
        dtype, shape = self._state.opened.dtype, (total, self._state.blocks.hidden_size)
        if (step.tensor.dtype, step.tensor.shape) != (dtype, shape):
            raise ProtocolError(
                "bad_tensor",
                f"expected {dtype}{list(shape)}, got {step.tensor.dtype}{list(step.tensor.shape)}",
            )

    def _truncate(self, lengths: Sequence[int]) -> None:
        if len(lengths) != len(self._state.tables):
            raise ProtocolError("bad_rows", f"{len(lengths)} lengths")
        self._output_ranges = [
            kept and range(kept.start, min(kept.stop, length))
            for kept, length in zip(self._output_ranges, lengths, strict=True)
        ]
        self._state.truncate(lengths)

    def _import_values(self, pages: Pages, payload: bytearray, slots: slice | Tensor) -> None:
        tokens = tensors.decode(pages.tensor, payload, max_bytes=pages.tensor.max_nbytes)
        self._state.tables[pages.row].pool.import_tokens(slots, self._state.blocks.span, tokens)

    def _import_codes(
        self, pages: QuantizedPages, payload: bytearray, slots: slice | Tensor
    ) -> None:
        codes_LB = torch.frombuffer(payload, dtype=torch.uint8).view(pages.count, -1)
        self._state.tables[pages.row].pool.import_bytes(slots, self._state.blocks.span, codes_LB)


class SessionDonor:
    """Hands a session to one successor at a time; the stream stays open for later syncs."""

    def __init__(
        self,
        dial: Callable[[Downstream], Awaitable[tuple[Stream, TransferOpened]]],
        state: SessionState,
        executor: Executor,
    ) -> None:
        self._dial = dial
        self._state = state
        self._executor = executor
        self._successor: Downstream | None = None
        self._transfer: TransferSender | None = None
        self.is_busy = False
        """Whether a sync is in progress."""

    async def sync(self, successor: Downstream) -> tuple[int, ...]:
        """Send what it lacks; return the lengths that it then holds. Raises `ProtocolError`."""
        span = self._state.blocks.span
        if successor.blocks != (span.start, span.end):
            raise ProtocolError("bad_link", f"blocks {successor.blocks} are not {span}")
        if self.is_busy:
            raise ProtocolError("unexpected", "the session is being handed over already")
        self.is_busy = True
        try:
            if self._transfer is None or successor != self._successor:
                await self.close()
                stream, opened = await self._dial(successor)
                self._successor = successor
                self._transfer = TransferSender(stream, self._state, self._executor, opened)
            return await self._transfer.sync()
        except ProtocolError:
            await self.close()
            raise
        finally:
            self.is_busy = False

    def truncate(self, lengths: Sequence[int]) -> None:
        """Record that the session was truncated to `lengths`."""
        if self._transfer is not None:
            self._transfer.truncate(lengths)

    async def close(self) -> None:
        """Close the stream. May be called twice."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            await transfer.stream.close()
