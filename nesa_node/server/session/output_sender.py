"""Output of a session: kept for replay, then sent to the next node or to the client.

T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import torch

from nesa_node.compression import tensors
from nesa_node.compression.codecs import UNCOMPRESSED
from nesa_node.compression.tensors import HiddenStates, TensorMeta
from nesa_node.core.errors import ProtocolError, StreamClosedError
from nesa_node.core.logging import get_logger
from nesa_node.server.scheduler.session_queue import FinishedStep
from nesa_node.server.session.session_state import MIN_THREADED_BYTES, SessionState
from nesa_node.swarm.p2p.tasks import running_in_background
from nesa_node.swarm.protocol.link_encoder import (
    HiddenStatesSpec,
    LinkEncoder,
    extend_via,
    normalize_via,
)
from nesa_node.swarm.protocol.messages import (
    MAX_TOKENS,
    Downstream,
    ErrorMessage,
    Output,
    Received,
    RowSlice,
    Step,
)
from nesa_node.swarm.protocol.replay_buffer import ReplaySlice, SentStep, last_positions
from nesa_node.swarm.protocol.seal_messages import Disclosed
from nesa_node.swarm.protocol.stream import Stream

log = get_logger(__name__)

OnLost = Callable[[str], Awaitable[None]]


class DownstreamStream:
    """Sends until the downstream is lost or refuses; then calls `on_lost(reason)` once."""

    def __init__(self, stream: Stream, wire: LinkEncoder, on_lost: OnLost) -> None:
        self.is_lost = False
        self.stream = stream
        self._wire = wire
        self._on_lost = on_lost

    @property
    def is_writable(self) -> bool:
        return self.is_lost or self.stream.can_send_now

    async def send(self, step: Step, payload: memoryview | bytes | bytearray) -> None:
        """Send a step; nothing to a lost downstream, whose outputs are kept for replay."""
        if self.is_lost:
            return
        try:
            await self.stream.send(step, payload)
        except StreamClosedError as error:
            await self._mark_lost(str(error))

    async def read_replies(self) -> None:
        """Read the downstream's messages: arrival reports, or a refusal.

        At most one report per message sent; more is a flood that its client has not paid for.
        """
        reports = 0
        try:
            message, _ = await self.stream.receive()
            while isinstance(message, Received):
                reports += 1
                if reports > self.stream.messages_sent:
                    raise ProtocolError("unexpected", "it tells of messages that were not sent")
                self._wire.record_arrival(message)
                if self.stream.unread_bytes:
                    await asyncio.sleep(0)
                message, _ = await self.stream.receive()
            reply = message.message if isinstance(message, ErrorMessage) else type(message).__name__
            await self._mark_lost(f"it answered: {reply}")
        except ProtocolError as error:
            await self._mark_lost(str(error))

    def abort(self) -> None:
        """Stop sending and abort a send in progress."""
        self.is_lost = True
        self.stream.abort()

    async def _mark_lost(self, reason: str) -> None:
        if not self.is_lost:
            self.is_lost = True
            log.info("downstream_lost", peer=self.stream.peer, reason=reason)
            await self._on_lost(reason)


@asynccontextmanager
async def open_downstream(
    stream: Stream, wire: LinkEncoder, on_lost: OnLost
) -> AsyncIterator[DownstreamStream]:
    """Open a push over `stream`, which is closed on exit."""
    push = DownstreamStream(stream, wire, on_lost)
    try:
        async with running_in_background(push.read_replies()):
            yield push
    finally:
        await stream.close()


DialDownstream = Callable[[Downstream, int], Awaitable[tuple[Stream, LinkEncoder]]]
"""`dial(downstream, epoch)` opens a push stream. Raises `ProtocolError("downstream_lost")`."""


class OutputSender:
    """Sends each step's output in order. Only one task at a time may call it."""

    def __init__(
        self,
        client: Stream,
        wire: LinkEncoder,
        state: SessionState,
        dial: DialDownstream,
        stream_scope: AsyncExitStack,
    ) -> None:
        """`wire` is the client's. The caller closes `stream_scope`, and thereby the push stream."""
        opened = state.opened
        self._client = client
        self._wire = self.client_wire = wire
        self._state = state
        self._states = HiddenStatesSpec(
            state.blocks.hidden_size, opened.dtype, opened.rows * opened.max_tokens
        )
        self._dial = dial
        self._downstream: Downstream | None = None
        self._stream: DownstreamStream | None = None
        self.last_pushed = (-1, -1)
        """Epoch and number of the last step of which sending downstream has begun."""
        self.decoding = 0
        """Most sessions that decode here or at a node before, sent with each output."""
        self._stream_scope = stream_scope

    @property
    def is_writable(self) -> bool:
        """Whether a small output can be sent without waiting."""
        if self._downstream is None:
            return self._client.can_send_now
        return self._stream is None or self._stream.is_writable

    async def emit(self, finished: FinishedStep) -> None:
        """Keep, seal and send the output of a step.

        Raises `ProtocolError("not_finite")` for an output that the next node would have to report:
        a client's large inputs suffice to make a node compute one.
        """
        step, hidden, output = finished
        await self._state.sealer.add_inputs(step.rows, hidden)
        if self._downstream is None:
            # An output for the client is compressed once the wanted tokens are known.
            meta, payload = output.meta, output.payload
        else:
            await _require_finite(output)
            meta, payload = await self._wire.encode_off_loop(output)
        via = normalize_via(self._state.opened.quality, step.via)
        kept = SentStep(step.step, step.rows, step.want, meta, payload, via)
        if self._downstream is not None:
            self._state.replay_buffer.append(kept)
            await self._state.sealer.add_outputs(step.rows, meta, payload)
        await self._send(ReplaySlice.of_step(kept), step.epoch)

    def abort_other_than(self, downstream: Downstream | None) -> None:
        """Abort the stream to any other node than `downstream`, with a send in progress.

        Across a cut link, a large send would otherwise be waited for until it times out.
        """
        if downstream != self._downstream and self._stream is not None:
            self._stream.abort()

    async def link(
        self, downstream: Downstream | None, epoch: int, emit_from: Sequence[int]
    ) -> None:
        """Send to `downstream` (None: the client) from now on, first the stored outputs that it
        lacks.

        `emit_from` gives, per row, the first position that it lacks. A live stream to the same node
        is reused. Raises `ProtocolError("downstream_lost")`.
        """
        self._state.emit_from = emit_from
        alive = self._stream is not None and not self._stream.is_lost
        if downstream != self._downstream or (downstream is not None and not alive):
            self._downstream, self._wire = downstream, self.client_wire
            self._stream = None
            await self._stream_scope.aclose()
            if downstream is not None:
                stream, self._wire = await self._dial(downstream, epoch)
                self._stream = await self._stream_scope.enter_async_context(
                    open_downstream(stream, self._wire, partial(self._report_lost, downstream.peer))
                )
        await self._begin_wire()
        for held in self._state.replay_buffer.iter_steps(emit_from, [MAX_TOKENS] * len(emit_from)):
            if self._stream is not None and self._stream.is_lost:
                return
            await self._send(held, epoch)
            # A receiver that takes each output at once would otherwise block the event loop.
            await asyncio.sleep(0)

    async def _begin_wire(self) -> None:
        if self._stream is None:
            return await self._wire.prepare(self._client, self._states)
        try:
            await self._wire.prepare(self._stream.stream, self._states)
        except StreamClosedError as error:
            raise ProtocolError("downstream_lost", str(error)) from error

    async def _send(self, held: ReplaySlice, epoch: int) -> None:
        """Send the part of a step that its receiver lacks."""
        emit_from = self._state.emit_from
        lacking = held.clip(emit_from, [MAX_TOKENS] * len(emit_from))
        if lacking is None:
            return
        sent_step = await lacking.materialize()
        if self._downstream is None:
            await self._send_to_client(sent_step, epoch)
        elif self._stream is not None:
            sent_step = self._wire.reencode(sent_step)
            self.last_pushed = epoch, sent_step.step
            await self._stream.send(
                Step(
                    session=self._state.opened.session,
                    epoch=epoch,
                    step=sent_step.step,
                    rows=sent_step.rows,
                    tensor=sent_step.meta,
                    want=sent_step.want,
                    via=extend_via(sent_step.via, sent_step.meta.codec),
                    decoding=self.decoding,
                ),
                sent_step.payload,
            )

    async def _send_to_client(self, sent_step: SentStep, epoch: int) -> None:
        meta, payload = sent_step.meta, sent_step.payload
        sent_rows = sent_step.rows
        if sent_step.want == "last" and any(row_slice.count > 1 for row_slice in sent_step.rows):
            ends = torch.tensor([row_slice.count for row_slice in sent_step.rows]).cumsum(0) - 1
            sent_rows = last_positions(sent_rows)
            meta, payload = await self.client_wire.encode_off_loop(
                HiddenStates.from_tensor(sent_step.decode()[ends])
            )
        elif sent_step.want == "none":
            meta, payload = tensors.encode(sent_step.decode()[:0])
        elif self.client_wire.compresses and meta.codec == UNCOMPRESSED:
            meta, payload = await self.client_wire.encode_off_loop(
                HiddenStates.from_tensor(sent_step.decode())
            )
        await self._state.sealer.add_outputs(sent_rows, meta, payload)
        via = extend_via(sent_step.via, meta.codec)
        await self._client.send(
            Output(
                epoch=epoch,
                step=sent_step.step,
                rows=sent_step.rows,
                tensor=meta,
                via=via,
                decoding=self.decoding,
            ),
            payload,
        )

    async def disclose(self, rows: Sequence[RowSlice]) -> None:
        """Send the client the outputs that were pushed for `rows`, as their receiver decoded them.

        Raises `ProtocolError("not_kept")`, also after some were sent.
        """
        start, until = [0] * self._state.opened.rows, [0] * self._state.opened.rows
        for part in rows:
            if part.row >= len(start):
                raise ProtocolError("bad_rows", f"row {part.row} does not exist")
            start[part.row], until[part.row] = part.position, part.position + part.count
        lacking = sum(until) - sum(start)
        for held in self._state.replay_buffer.iter_steps(start, until):
            sent_step = await held.materialize()
            meta, payload = tensors.encode(sent_step.decode())
            await self._client.send(Disclosed(rows=sent_step.rows, tensor=meta), payload)
            lacking -= meta.shape[0]
        if lacking:
            raise ProtocolError("not_kept", f"the outputs of {lacking} positions are not here")
        nothing = TensorMeta(self._state.opened.dtype, (0, self._state.blocks.hidden_size))
        await self._client.send(Disclosed(rows=(), tensor=nothing), b"")

    async def _report_lost(self, peer: str, reason: str) -> None:
        """Tell the client, which links a replacement; until then outputs are only stored."""
        try:
            await self._client.send(
                ErrorMessage(code="downstream_lost", message=reason, fatal=False, peer=peer)
            )
        except StreamClosedError:
            log.debug("client_disconnected", peer=self._client.peer)


async def _require_finite(output: HiddenStates) -> None:
    """Raises `ProtocolError("not_finite")` for NaN or infinite values."""
    large = output.nbytes >= MIN_THREADED_BYTES
    if not (await asyncio.to_thread(_is_finite, output) if large else output.is_finite):
        raise ProtocolError("not_finite", "these inputs make this node compute NaN or infinities")


def _is_finite(output: HiddenStates) -> bool:
    return output.is_finite
