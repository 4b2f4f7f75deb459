"""A peer that breaks the session protocol on purpose and notes how each attempt was answered."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from nesa_node.compression import tensors
from nesa_node.core.errors import ProtocolError, StreamClosedError
from nesa_node.core.ids import PeerId
from nesa_node.swarm.node import Swarm, open_swarm
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.protocol.any_message import AnyMessage, encode_message
from nesa_node.swarm.protocol.messages import (
    PROTOCOL,
    Busy,
    Closed,
    ErrorMessage,
    Link,
    Linked,
    Message,
    Opened,
    Output,
    Ping,
    Pong,
    RowSlice,
    Step,
)
from nesa_node.swarm.protocol.stream import Stream
from tests.hostile.frames import MAX_TOKENS, ROWS, Facts, frame, message_frame, open_message

DEADLINE_S = 15.0
"""For any answer: a node gives a new stream 10 s for its first message."""
_PATIENCE_S = 0.5
"""After it the node is taken to wait for more bytes, and we hang up."""
_MAX_OUTPUT_BYTES = 1 << 24

UNANSWERED = "UNANSWERED"
HUNG_UP = "hung up"
WRONG = "WRONG"


class Tally:
    """How often which attack was answered how. `frames` counts what was sent."""

    def __init__(self) -> None:
        self.frames = 0
        self.answers: Counter[tuple[str, str]] = Counter()

    def note(self, kind: str, answer: str, allowed: Sequence[str] = ()) -> None:
        self.frames += 1
        if allowed and answer not in allowed:
            answer = f"{WRONG}: {answer}, not {' or '.join(allowed)}"
        self.answers[kind, answer] += 1

    def failures(self) -> list[str]:
        bad = (UNANSWERED, WRONG)
        return [f"{kind}: {a} x{n}" for (kind, a), n in self.answers.items() if a.startswith(bad)]

    def summary(self) -> str:
        kinds: dict[str, list[str]] = {}
        for (kind, answer), count in sorted(self.answers.items()):
            kinds.setdefault(kind, []).append(f"{answer} x{count}")
        return "\n".join(f"  {kind}: {', '.join(found)}" for kind, found in kinds.items())


class Wire:
    """One stream to the attacked node, below the level at which messages are well-formed."""

    def __init__(
        self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.writer = writer
        self.stream = Stream(peer, reader, writer)

    async def send(self, data: bytes) -> None:
        """What the node does not take any more is lost: it has closed, which is an answer."""
        try:
            self.writer.write(data)
            async with asyncio.timeout(DEADLINE_S):
                await self.writer.drain()
        except OSError:
            pass

    async def receive(self, timeout_s: float = DEADLINE_S) -> AnyMessage | None:
        """The next message, None at the end of the stream. Raises `TimeoutError`."""
        try:
            async with asyncio.timeout(timeout_s):
                message, _ = await self.stream.receive(max_tensor_bytes=_MAX_OUTPUT_BYTES)
                return message
        except StreamClosedError:
            return None

    async def outcome(self, *, may_wait: bool = False) -> str:
        """The node's last words, or how it ended the stream without; "hung up" if it `may_wait`
        for more and we did not."""
        last = "closed"
        try:
            if may_wait:
                try:
                    message = await self.receive(_PATIENCE_S)
                except TimeoutError:
                    self.writer.write_eof()
                    last = HUNG_UP
                    message = await self.receive()
            else:
                message = await self.receive()
            while message is not None:
                last = describe(message)
                if isinstance(message, Opened):
                    # A mutation that was no harm. It is nothing to us.
                    return last
                if isinstance(message, Busy | Closed) or _is_fatal(message):
                    # It closes when we have, or a second later.
                    return last
                message = await self.receive()
        except TimeoutError:
            return UNANSWERED
        except OSError:
            pass  # of which the one above is a kind
        except ProtocolError as error:
            return f"{WRONG}: the node sent {error}"
        return last


def _is_fatal(message: AnyMessage) -> bool:
    return isinstance(message, ErrorMessage) and message.fatal


def describe(message: AnyMessage) -> str:
    if isinstance(message, ErrorMessage):
        return message.code
    return "busy" if isinstance(message, Busy) else type(message).__name__.lower()


async def answer_of(wire: Wire) -> str:
    """The next message, or "hung up" where the node waits for more and we do not."""
    with suppress(TimeoutError):
        message = await wire.receive(_PATIENCE_S)
        return "closed" if message is None else describe(message)
    wire.writer.write_eof()
    try:
        message = await wire.receive()
    except TimeoutError:
        return UNANSWERED
    return HUNG_UP if message is None else describe(message)


@asynccontextmanager
async def attackers(
    folder: Path, addresses: Sequence[str], count: int
) -> AsyncIterator[list[Swarm]]:
    """Identities of their own."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                open_swarm(Identity.ephemeral(folder), initial_peers=addresses, listen=False)
            )
            for _ in range(count)
        ]


class Attacker:
    """Opens streams and sessions at one node, under one identity."""

    def __init__(self, swarm: Swarm, facts: Facts, rng: random.Random, tally: Tally) -> None:
        self.swarm = swarm
        self.facts = facts
        self.rng = rng
        self.tally = tally

    @asynccontextmanager
    async def wire(self) -> AsyncIterator[Wire]:
        peer = PeerId(self.facts.peer_id)
        opened = await self.swarm.transport.open_stream(peer, PROTOCOL, timeout_s=DEADLINE_S)
        wire = Wire(peer, *opened)
        try:
            yield wire
        finally:
            await wire.stream.close()

    async def first(self, kind: str, data: bytes, allowed: Sequence[str] = ()) -> None:
        """Send `data` as all that a new stream ever carries."""
        async with self.wire() as wire:
            await wire.send(data)
            answer = await wire.outcome(may_wait=HUNG_UP in allowed)
            self.tally.note(kind, answer, allowed)

    @asynccontextmanager
    async def session(self, **changes: Any) -> AsyncIterator[HostileSession]:
        """A session that was opened as it should be; unlinked."""
        async with self.wire() as wire:
            opening = open_message(self.facts, self.rng, **changes)
            await wire.send(frame(encode_message(opening)))
            answer = await wire.receive()
            assert isinstance(answer, Opened), f"an honest open was answered by {answer}"
            yield HostileSession(self, wire, opening.session, opening.secret)


class HostileSession:
    """A session of two rows from whose ordinary course single frames deviate."""

    def __init__(self, attacker: Attacker, wire: Wire, session: bytes, secret: bytes) -> None:
        self.wire = wire
        self.id = session
        self.secret = secret
        self.alive = True
        self.epoch = 0
        self.lengths = [0] * ROWS
        self.last_step = 0
        self.last_frame = b""
        self._attacker = attacker
        self._nonces = itertools.count(1)

    async def link(self, **changes: Any) -> None:
        """Begin the next epoch, from nothing."""
        zeros = (0,) * ROWS
        message = Link(
            epoch=self.epoch + 1, upstream=None, downstream=None, lengths=zeros, emit_from=zeros
        )
        await self.wire.send(message_frame(message, **changes))
        answer = await self.wire.receive()
        assert isinstance(answer, Linked), f"an honest link was answered by {answer}"
        self._begin(self.epoch + 1)

    def step(self, payload: bytes | None = None, *, count: int = 1, **changes: Any) -> bytes:
        """The frame of the next step of row 0, with changes."""
        hidden_TD = torch.ones(count, self._attacker.facts.hidden_size)
        meta, data = tensors.encode(hidden_TD)
        message = Step(
            session=self.id,
            epoch=self.epoch,
            step=self.last_step + 1,
            rows=(RowSlice(0, self.lengths[0], count),),
            tensor=meta,
        )
        if "tensor" in changes:
            changes["tensor"] = {**msgspec.to_builtins(meta), **changes["tensor"]}
        return message_frame(message, bytes(data) if payload is None else payload, **changes)

    def steps_in_order(self, count: int) -> list[bytes]:
        """Frames that continue each other; the session is taken to have had them all."""
        frames = []
        for _ in range(count):
            frames.append(self.step())
            self.lengths[0] += 1
            self.last_step += 1
        return frames

    async def advance(self) -> None:
        """An ordinary step, so that later ones can repeat it or be stale."""
        if self.lengths[0] >= MAX_TOKENS - 4:
            await self.link()
        self.last_frame = self.step()
        await self.wire.send(self.last_frame)
        answer = await self.wire.receive()
        assert isinstance(answer, Output), f"an honest step was answered by {answer}"
        self.lengths[0] += 1
        self.last_step += 1

    async def attack(self, kind: str, data: bytes, allowed: Sequence[str] = ()) -> str:
        """Send `data`, then a ping: the answer to `data` is what comes before the pong."""
        await self.wire.send(data)
        answer = await self._settle(DEADLINE_S if allowed else _PATIENCE_S)
        self._attacker.tally.note(kind, answer, allowed)
        if answer == "downstream_lost":
            await self.link()
        return answer

    async def _settle(self, patience_s: float) -> str:
        nonce = next(self._nonces)
        await self.wire.send(frame(encode_message(Ping(nonce=nonce))))
        answer = "ignored"
        try:
            while True:
                message = await self.wire.receive(patience_s)
                if isinstance(message, Pong) and message.nonce == nonce:
                    if message.epoch != self.epoch:
                        self._begin(message.epoch)
                    return answer
                if message is None:
                    self.alive = False
                    return "closed" if answer == "ignored" else answer
                answer = describe(message)
                if _is_fatal(message):
                    self.alive = False
                    return answer
        except TimeoutError:
            # Perhaps it waits for the rest of a longer frame, of which our ping became a part.
            self.alive = False
            return await self.wire.outcome(may_wait=True)
        except ProtocolError as error:
            self.alive = False
            return f"{WRONG}: the node sent {error}"

    def _begin(self, epoch: int) -> None:
        self.epoch, self.lengths, self.last_frame = epoch, [0] * ROWS, b""

    async def say(self, message: Message) -> AnyMessage | None:
        await self.wire.send(frame(encode_message(message)))
        return await self.wire.receive()
