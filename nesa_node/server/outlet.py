"""Output of a session: kept for replay, then sent to the next node or to the client.

T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

import torch

from nesa_node.compression import tensors
from nesa_node.compression.hidden_states import HiddenStates
from nesa_node.core.errors import ProtocolError, StreamClosedError
from nesa_node.core.logging import get_logger
from nesa_node.server.inbox import LARGE_BYTES
from nesa_node.server.push import Push, open_push
from nesa_node.swarm.messages import MAX_TOKENS, Downstream, Error, Open, Output, Step
from nesa_node.swarm.outbox import Held, Kept, Outbox
from nesa_node.swarm.stream import Stream
from nesa_node.swarm.wire import PLAIN, States, Wire, known, passed_on

log = get_logger(__name__)

Dial = Callable[[Downstream, int], Awaitable[tuple[Stream, Wire]]]
"""`dial(downstream, epoch)` opens a push stream. Raises `ProtocolError("downstream_lost")`."""


class Outlet:
    """Sends each step's output in order. Only one task at a time may call it."""

    def __init__(
        self, client: Stream, wire: Wire, opened: Open, hidden_size: int, dial: Dial
    ) -> None:
        """`wire` is the client's."""
        self._client = client
        self._wire = self.client_wire = wire
        self._session = opened.session
        self._mode = opened.mode
        self._quality = opened.quality
        self._states = States(hidden_size, opened.dtype, opened.rows * opened.max_tokens)
        self._dial = dial
        self._outbox = Outbox()
        self._emit_from: Sequence[int] = [0] * opened.rows
        self._downstream: Downstream | None = None
        self._push: Push | None = None
        self.pushed = (-1, -1)
        """Epoch and number of the last step of which sending downstream has begun."""
        self._push_scope = AsyncExitStack()

    @property
    def settled(self) -> bool:
        """Whether a small output can be sent without waiting."""
        if self._downstream is None:
            return self._client.settled
        return self._push is None or self._push.settled

    async def emit(self, step: Step, output: HiddenStates) -> None:
        """Keep and send the output [T, D] of a step.

        Raises `ProtocolError("not_finite")` for an output that the next node would have to report:
        a client's large inputs suffice to make a node compute one.
        """
        if self._downstream is None:
            # An output for the client is compressed once the wanted tokens are known.
            meta, payload = output.meta, output.payload
        else:
            await _require_finite(output)
            meta, payload = await self._wire.encode_aside(output)
        via = known(self._quality, step.via)
        kept = Kept(step.step, step.rows, step.want, meta, payload, via)
        if self._downstream is not None:
            self._outbox.append(kept)
        await self._send(Held.all_of(kept), step.epoch)

    def keep(self, kept: Kept) -> None:
        """Store an output that the donor of this session kept.

        Raises `ProtocolError` in a star, where nodes keep no outputs.
        """
        if self._mode == "star":
            raise ProtocolError("unexpected", "a star's nodes keep no outputs")
        self._outbox.append(replace(kept, via=known(self._quality, kept.via)))

    def kept(self, start: Sequence[int], end: Sequence[int]) -> Iterator[Held]:
        """Stored outputs of the tokens `start[row] <= position < end[row]`."""
        return self._outbox.since(start, end)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Drop stored outputs of tokens from `lengths` on; they will be sent anew."""
        self._outbox.truncate(lengths)
        self._emit_from = [min(pair) for pair in zip(self._emit_from, lengths, strict=True)]

    def reorder(self, sources: Sequence[int]) -> None:
        """Let each row continue with the sent state of row `sources[row]`."""
        self._outbox.reorder(sources)
        self._emit_from = [self._emit_from[source] for source in sources]

    def leave_all_but(self, downstream: Downstream | None) -> None:
        """Abort the stream to any other node than `downstream`, with a send in progress.

        Across a cut link, a large send would otherwise be waited for until it times out.
        """
        if downstream != self._downstream and self._push is not None:
            self._push.leave()

    async def link(
        self, downstream: Downstream | None, epoch: int, emit_from: Sequence[int]
    ) -> None:
        """Send to `downstream` (None: the client) from now on, first the stored outputs that it
        lacks.

        `emit_from` gives, per row, the first position that it lacks. A live stream to the same node
        is reused. Raises `ProtocolError("downstream_lost")`.
        """
        self._emit_from = emit_from
        alive = self._push is not None and not self._push.lost
        if downstream != self._downstream or (downstream is not None and not alive):
            self._downstream, self._wire = downstream, self.client_wire
            self._push = None
            await self._push_scope.aclose()
            if downstream is not None:
                stream, self._wire = await self._dial(downstream, epoch)
                self._push = await self._push_scope.enter_async_context(
                    open_push(stream, self._wire, partial(self._tell_lost, downstream.peer))
                )
        await self._begin()
        for held in self._outbox.since(emit_from, [MAX_TOKENS] * len(emit_from)):
            if self._push is not None and self._push.lost:
                return
            await self._send(held, epoch)
            # A receiver that takes each output at once would otherwise block the event loop.
            await asyncio.sleep(0)

    async def _begin(self) -> None:
        if self._push is None:
            return await self._wire.begin(self._client, self._states)
        try:
            await self._wire.begin(self._push.stream, self._states)
        except StreamClosedError as error:
            raise ProtocolError("downstream_lost", str(error)) from error

    def forget(self) -> None:
        """Drop stored outputs, so that references to this object hold no memory."""
        self._outbox = Outbox()

    async def close(self) -> None:
        """Close the downstream stream."""
        await self._push_scope.aclose()

    async def _send(self, held: Held, epoch: int) -> None:
        """Send the part of a step that its receiver lacks."""
        lacking = held.within(self._emit_from, [MAX_TOKENS] * len(self._emit_from))
        if lacking is None:
            return
        part = await lacking.copied()
        if self._downstream is None:
            await self._answer(part, epoch)
        elif self._push is not None:
            part = self._wire.readable(part)
            self.pushed = epoch, part.step
            await self._push.send(
                Step(
                    session=self._session,
                    epoch=epoch,
                    step=part.step,
                    rows=part.rows,
                    tensor=part.meta,
                    want=part.want,
                    via=passed_on(part.via, part.meta.codec),
                ),
                part.payload,
            )

    async def _answer(self, kept: Kept, epoch: int) -> None:
        meta, payload = kept.meta, kept.payload
        if kept.want == "last" and any(part.count > 1 for part in kept.rows):
            ends = torch.tensor([part.count for part in kept.rows]).cumsum(0) - 1
            meta, payload = await self.client_wire.encode_aside(
                HiddenStates.of(kept.tensor()[ends])
            )
        elif kept.want == "none":
            meta, payload = tensors.encode(kept.tensor()[:0])
        elif self.client_wire.compresses and meta.codec == PLAIN:
            meta, payload = await self.client_wire.encode_aside(HiddenStates.of(kept.tensor()))
        via = passed_on(kept.via, meta.codec)
        await self._client.send(
            Output(epoch=epoch, step=kept.step, rows=kept.rows, tensor=meta, via=via), payload
        )

    async def _tell_lost(self, peer: str, reason: str) -> None:
        """Report a lost downstream to the client. Later outputs are only stored until it links a
        replacement.
        """
        try:
            await self._client.send(
                Error(code="downstream_lost", message=reason, fatal=False, peer=peer)
            )
        except StreamClosedError:
            log.debug("client_disconnected", peer=self._client.peer)


async def _require_finite(output: HiddenStates) -> None:
    """Raises `ProtocolError("not_finite")` for NaN or infinite values."""
    large = output.nbytes >= LARGE_BYTES
    if not (await asyncio.to_thread(_is_finite, output) if large else output.is_finite):
        raise ProtocolError("not_finite", "these inputs make this node compute NaN or infinities")


def _is_finite(output: HiddenStates) -> bool:
    return output.is_finite
