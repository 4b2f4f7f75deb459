"""A member that trains by an honest node behind it, and changes some of what that answers.

So all answers but the changed ones are right, and steps go on up to the misdeed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from nesa_node.compression import tensors
from nesa_node.core.errors import NesaError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.swarm.dht.training_notices import TrainingNotice
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.protocol.messages import PROTOCOL, ErrorMessage, Ping, Pong, Probe
from nesa_node.swarm.protocol.stream import Stream
from nesa_node.swarm.protocol.training_messages import (
    TrainApplied,
    TrainBegan,
    TrainGradient,
    TrainNormed,
    TrainOpen,
    TrainOpened,
    TrainOutput,
    TrainState,
    TrainTensor,
)
from tests.hostile.frames import message_frame

MAX_BYTES = 1 << 24
Change = Callable[["Relayed", Any, bytes], Awaitable[None]]
"""Sends something in place of an honest answer and its tensor."""


@dataclass(frozen=True, slots=True)
class Misdeed:
    """What is done in place of one kind of answer, and how the client names it."""

    name: str
    answer: type[Any]
    change: Change
    code: str
    answers_pings: bool = True
    after: int = 0
    """Answers of this kind that are honest before."""


@dataclass
class Relayed:
    client: Stream
    relay: TrainingRelay
    seen: int = 0

    async def send_raw(self, data: bytes) -> None:
        self.client._writer.write(data)
        await self.client._writer.drain()

    async def send(self, message: Any, payload: bytes = b"", **changes: Any) -> None:
        await self.send_raw(message_frame(message, payload, **changes))


class TrainingRelay:
    """`behind` is the honest node."""

    def __init__(self, swarm: Swarm, behind: PeerId, addresses: tuple[str, ...]) -> None:
        self.swarm = swarm
        self.misdeed: Misdeed | None = None
        self.opens = 0
        self.misdeeds = 0
        self._behind = behind
        self._addresses = addresses

    async def handle(
        self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        client = Stream(peer, reader, writer)
        try:
            opened, _ = await client.receive()
            if not isinstance(opened, TrainOpen):
                return
            self.opens += 1
            opened = await self._sign(opened)
            dialed = await self.swarm.transport.open_stream(self._behind, PROTOCOL, self._addresses)
            behind = Stream(self._behind, *dialed)
            try:
                await behind.send(opened)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._ask(client, behind))
                    tasks.create_task(self._answer(Relayed(client, self), behind))
            finally:
                await behind.close()
        except* (NesaError, OSError):
            pass  # one of both has hung up

    async def _sign(self, opened: TrainOpen) -> TrainOpen:
        """The client's plan, as this member's own."""
        signed = self.swarm.notices.open(TrainingNotice, opened.notice)
        _, sealed = self.swarm.notices.sign(
            TrainingNotice, ModelId(opened.model), ttl_s=600.0, plans=signed.plans
        )
        return msgspec.structs.replace(opened, notice=sealed)

    async def _ask(self, client: Stream, behind: Stream) -> None:
        while True:
            message, payload = await client.receive(max_tensor_bytes=MAX_BYTES)
            if isinstance(message, Ping) and self.misdeeds and self.misdeed is not None:
                if self.misdeed.answers_pings:
                    busy = self.misdeed.name == "busy for ever"
                    await client.send(Pong(nonce=message.nonce, epoch=0, step=0, busy=busy))
                continue
            await behind.send(message, payload)

    async def _answer(self, relayed: Relayed, behind: Stream) -> None:
        while True:
            message, payload = await behind.receive(max_tensor_bytes=MAX_BYTES)
            misdeed = self.misdeed
            if misdeed is not None and isinstance(message, misdeed.answer):
                relayed.seen += 1
                if relayed.seen > misdeed.after:
                    self.misdeeds += 1
                    await misdeed.change(relayed, message, bytes(payload))
                    continue
            await relayed.client.send(message, payload)


def with_values(value: float) -> Change:
    async def change(relayed: Relayed, message: Any, payload: bytes) -> None:
        values = torch.full(message.tensor.shape, value)
        await relayed.send(message, bytes(tensors.encode(values)[1]))

    return change


def with_fields(**changes: Any) -> Change:
    async def change(relayed: Relayed, message: Any, payload: bytes) -> None:
        await relayed.send(message, payload, **changes)

    return change


def with_next(field: str) -> Change:
    """The answer of another step, or of another micro-batch."""

    async def change(relayed: Relayed, message: Any, payload: bytes) -> None:
        await relayed.send(message, payload, **{field: getattr(message, field) + 1})

    return change


async def another_shape(relayed: Relayed, message: Any, payload: bytes) -> None:
    meta, data = tensors.encode(torch.ones(message.tensor.shape[0], message.tensor.shape[1] + 1))
    await relayed.send(message, bytes(data), tensor={"dtype": meta.dtype, "shape": meta.shape})


async def another_codec(relayed: Relayed, message: Any, payload: bytes) -> None:
    meta, data = tensors.encode(torch.ones(message.tensor.shape), codec="bfloat16")
    fields = {"dtype": meta.dtype, "shape": meta.shape, "codec": meta.codec}
    await relayed.send(message, bytes(data), tensor=fields)


async def other_names(relayed: Relayed, message: Any, payload: bytes) -> None:
    await relayed.send(message, payload, name=message.name.replace("layers.", "layers.1"))


async def first_block(relayed: Relayed, message: Any, payload: bytes) -> None:
    """A tensor of a span that another node has."""
    head, _, rest = message.name.partition("layers.")
    await relayed.send(message, payload, name=f"{head}layers.0.{rest.partition('.')[2]}")


async def no_digits(relayed: Relayed, message: Any, payload: bytes) -> None:
    await relayed.send(message, payload, name="adapter.none")


async def endless_state(relayed: Relayed, message: Any, payload: bytes) -> None:
    """A million of one tensor."""
    await relayed.send(message, tensors=1 << 20)
    meta, data = tensors.encode(torch.ones(64, 1024))
    for number in range(1 << 20):
        await relayed.send(TrainTensor(name=f"adapter.{number}", tensor=meta), bytes(data))


async def silence(relayed: Relayed, message: Any, payload: bytes) -> None:
    """Neither this answer nor a later one."""
    await asyncio.Event().wait()


async def trickle(relayed: Relayed, message: Any, payload: bytes) -> None:
    for byte in message_frame(message, payload):
        await relayed.send_raw(bytes([byte]))
        await asyncio.sleep(0.2)


async def probes(relayed: Relayed, message: Any, payload: bytes) -> None:
    """Notices without end, and no answer."""
    meta, data = tensors.encode(torch.zeros(16))
    while True:
        await relayed.send(Probe(tensor=meta), bytes(data))
        await asyncio.sleep(0.01)


async def pong_before(relayed: Relayed, message: Any, payload: bytes) -> None:
    """As an honest node answers a ping while it sends a state."""
    await relayed.send(Pong(nonce=1, epoch=0, step=0, busy=False))
    await relayed.send(message, payload)


async def garbage(relayed: Relayed, message: Any, payload: bytes) -> None:
    await relayed.send_raw(b"\xff" * 64)


async def hang_up(relayed: Relayed, message: Any, payload: bytes) -> None:
    await relayed.client.close()


async def twice(relayed: Relayed, message: Any, payload: bytes) -> None:
    await relayed.send(message, payload)
    await relayed.send(message, payload)


def error(code: str, *, fatal: bool) -> Change:
    async def change(relayed: Relayed, message: Any, payload: bytes) -> None:
        await relayed.send(ErrorMessage(code=code, message="yours", fatal=fatal, answers="it"))

    return change


MISDEEDS = (
    Misdeed("NaN output", TrainOutput, with_values(math.nan), "not_finite", after=1),
    Misdeed("exploding output", TrainOutput, with_values(1e30), "bad_tensor", after=1),
    Misdeed("infinite gradient", TrainGradient, with_values(math.inf), "not_finite", after=2),
    Misdeed("shape of an output", TrainOutput, another_shape, "bad_tensor", after=1),
    Misdeed("shape of a gradient", TrainGradient, another_shape, "bad_tensor"),
    Misdeed("codec", TrainOutput, another_codec, "bad_tensor"),
    Misdeed("output of another step", TrainOutput, with_next("step"), "unexpected", after=1),
    Misdeed("another micro-batch", TrainOutput, with_next("micro"), "unexpected"),
    Misdeed("gradient of another", TrainGradient, with_next("micro"), "unexpected"),
    Misdeed("began another step", TrainBegan, with_next("step"), "unexpected"),
    Misdeed("began another plan", TrainBegan, with_fields(plan=bytes(32)), "unexpected"),
    Misdeed("another plan", TrainOpened, error("plan_mismatch", fatal=True), "plan_mismatch"),
    Misdeed("applied another step", TrainApplied, with_next("step"), "unexpected", after=1),
    Misdeed("an answer twice", TrainApplied, twice, "unexpected"),
    Misdeed("infinite norm", TrainNormed, with_fields(squared_norm=math.inf), "bad_frame"),
    Misdeed("NaN norm", TrainNormed, with_fields(squared_norm=math.nan), "bad_frame"),
    Misdeed("negative norm", TrainNormed, with_fields(squared_norm=-1.0), "bad_frame"),
    Misdeed("digest", TrainState, with_fields(digest=bytes(32)), "bad_tensor"),
    Misdeed("state of another step", TrainState, with_next("applied"), "unexpected"),
    Misdeed("fewer tensors", TrainState, with_fields(tensors=1), "bad_tensor"),
    Misdeed("names", TrainTensor, other_names, "bad_tensor"),
    Misdeed("another span's names", TrainTensor, first_block, "bad_tensor"),
    Misdeed("no block's names", TrainTensor, no_digits, "bad_tensor"),
    Misdeed("shape in a state", TrainTensor, another_shape, "bad_tensor"),
    Misdeed("endless state", TrainState, endless_state, "too_large"),
    Misdeed("computes nothing", TrainOutput, silence, "not_answered", after=1),
    Misdeed("busy for ever", TrainOutput, silence, "not_answered", after=1),
    Misdeed("probes without end", TrainGradient, probes, "lost", answers_pings=False),
    Misdeed("silence", TrainOutput, silence, "lost", answers_pings=False, after=1),
    Misdeed("trickle", TrainOutput, trickle, "lost", answers_pings=False),
    Misdeed("hangs up", TrainGradient, hang_up, "lost"),
    Misdeed("garbage", TrainNormed, garbage, "bad_frame"),
    Misdeed("refuses", TrainGradient, error("bad_tensor", fatal=False), "bad_tensor"),
    Misdeed("fatal error", TrainOutput, error("too_large", fatal=True), "too_large"),
    Misdeed("opens with garbage", TrainOpened, garbage, "bad_frame"),
    Misdeed("opens with an answer", TrainOpened, error("not_trained", fatal=True), "not_trained"),
)

NO_MISDEED = Misdeed("pongs in a state", TrainTensor, pong_before, "")
