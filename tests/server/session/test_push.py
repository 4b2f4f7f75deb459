"""What a node lets the next one say on the stream by which it pushes to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from nesa_node.compression.tensors import TensorMeta
from nesa_node.core.ids import PeerId
from nesa_node.server.session.output_sender import DownstreamStream, open_downstream
from nesa_node.swarm.protocol.messages import Probe, Received
from nesa_node.swarm.protocol.stream import Stream
from tests.swarm.pipes import pipe_pair
from tests.turns import turns_of_the_loop

RECEIVED = Received(nbytes=1 << 17, seconds=0.01)
PROBE = Probe(tensor=TensorMeta(dtype="float32", shape=(0,)))


@dataclass
class Listener:
    """What a push has heard of the next node, in place of its `Wire`."""

    heard: int = 0
    lost: asyncio.Future[str] = field(default_factory=asyncio.Future)

    def record_arrival(self, _: Received) -> None:
        self.heard += 1

    async def on_lost(self, reason: str) -> None:
        self.lost.set_result(reason)


@asynccontextmanager
async def pushing() -> AsyncIterator[tuple[DownstreamStream, Stream, Listener]]:
    """A push, the next node's end of its stream, and what the push hears."""
    listener: Any = Listener()
    async with pipe_pair() as (ours, theirs):
        stream = Stream(PeerId("next"), ours, ours)
        async with open_downstream(stream, listener, listener.on_lost) as push:
            yield push, Stream(PeerId("this"), theirs, theirs), listener


async def test_it_may_tell_of_each_message_once() -> None:
    async with pushing() as (push, downstream, listener), asyncio.timeout(5):
        for _ in range(3):
            await push.stream.send(PROBE)
        for _ in range(4):
            await downstream.send(RECEIVED)
        assert "not sent" in await listener.lost
        assert listener.heard == 3


async def test_what_it_has_saved_up_leaves_turns_to_all_else() -> None:
    number = 500
    async with pushing() as (push, downstream, listener), asyncio.timeout(5):
        push.stream.messages_sent = number
        async with turns_of_the_loop() as turns:
            for _ in range(number + 1):
                await downstream.send(RECEIVED)
            await listener.lost
            assert turns[0] >= number
        assert listener.heard == number
