"""Whom a node reports as wrong: never a neighbour for what a client made it push.

T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest
import torch

from nesa_node.compression.codecs import codec_names
from nesa_node.compression.tensors import HiddenStates
from nesa_node.core.ids import Span
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk, TokenSlice
from nesa_node.server.session import session_server
from nesa_node.swarm.p2p.link_measurements import LinkSpeed
from nesa_node.swarm.protocol.any_message import AnyMessage
from nesa_node.swarm.protocol.link_encoder import LinkEncoder as Codecs
from nesa_node.swarm.protocol.messages import (
    VERSION,
    Downstream,
    ErrorMessage,
    Linked,
    Message,
    Opened,
    Output,
    PushOpen,
    PushOpened,
    RowSlice,
)
from tests.server.bench import NODE, Node, Peer, Wire, open_node

DType = Literal["float32", "bfloat16", "float16"]
NEXT = "next"


class FarEnd:
    """The end of a wire that another node holds, as the `Stream` of its push."""

    can_send_now = True

    def __init__(self, wire: Wire) -> None:
        self.peer = wire.peer
        self._wire = wire

    async def send(self, message: Message, payload: memoryview | bytes = b"") -> None:
        self._wire.say(message, bytes(payload))

    async def receive(self) -> tuple[AnyMessage, bytes]:
        return await self._wire.hear()

    async def close(self) -> None:
        self._wire.hang_up()


class Pair:
    """Two nodes, of which the first pushes to the second what one client feeds it."""

    def __init__(self, first: Node, second: Node) -> None:
        self.first, self.second = first, second
        self._session = b"f" * 16

    async def dial(self, _lookup: Any, opened: Any, _to: Any, epoch: int) -> Any:
        wire = self.second.connect(NODE)
        wire.say(PushOpen(version=VERSION, session=opened.session, secret=b"s" * 32, epoch=epoch))
        await wire.hear_a(PushOpened)
        return FarEnd(wire), Codecs(opened.quality, codec_names(), LinkSpeed())

    @asynccontextmanager
    async def session(
        self, dtypes: tuple[DType, DType], qualities: tuple[str, str] = ("exact", "exact")
    ) -> AsyncIterator[tuple[Peer, Peer]]:
        """A client's session at both, opened with other words at each."""
        a, b = (node.peer("client", session=self._session) for node in (self.first, self.second))
        a.open(dtype=dtypes[0], quality=qualities[0], mode="chain")
        b.open(dtype=dtypes[1], quality=qualities[1], upstream=NODE)
        for peer in (a, b):
            await peer.wire.hear_a(Opened)
        end = self.first.blocks.span.end
        a.link(downstream=Downstream(peer=NEXT, blocks=(end, end + 1)))
        b.link(upstream=NODE)
        await asyncio.gather(*(peer.wire.hear_a(Linked) for peer in (a, b)))
        try:
            yield a, b
        finally:
            for peer in (a, b):
                peer.wire.hang_up()


@pytest.fixture
async def pair(blocks: ModelBlocks, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    async with open_node(blocks) as first, open_node(blocks) as second:
        pair = Pair(first, second)
        monkeypatch.setattr(session_server, "dial_downstream", pair.dial)
        yield pair


async def test_pushed_output_arrives(pair: Pair, blocks: ModelBlocks) -> None:
    """Or the tests below could not fail."""
    async with pair.session(("float32", "float32")) as (a, b):
        a.step({0: 2})
        output = await b.wire.hear_a(Output)
        assert output.tensor.shape == (2, blocks.hidden_size)
        assert (output.rows, blocks.span) == ((RowSlice(0, 0, 2),), Span(1, 3))
    assert pair.second.reported == []


@pytest.mark.parametrize(
    ("dtypes", "qualities"),
    [
        (("float32", "bfloat16"), ("exact", "exact")),
        (("bfloat16", "float16"), ("exact", "exact")),
        (("float32", "float32"), ("int8@2:32:8", "exact")),
    ],
)
async def test_node_is_not_blamed_for_what_a_client_opened_otherwise_at_the_next(
    pair: Pair, blocks: ModelBlocks, dtypes: tuple[DType, DType], qualities: tuple[str, str]
) -> None:
    async with pair.session(dtypes, qualities) as (a, _):
        a.step({0: 20}, torch.ones(20, blocks.hidden_size, dtype=getattr(torch, dtypes[0])))
        lost = await a.wire.hear_a(ErrorMessage)
        assert (lost.code, lost.fatal) == ("downstream_lost", False)
    assert pair.second.reported == []


async def test_node_does_not_push_the_infinities_that_a_client_makes_it_compute(
    pair: Pair, blocks: ModelBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Residuals of real models come as far in float16; this one's are made larger."""
    run = ModelBlocks.forward_buffers

    def overflowing(
        blocks: ModelBlocks, pieces: Sequence[TokenSlice], runs: Sequence[RowChunk]
    ) -> None:
        run(blocks, pieces, runs)
        for piece in pieces:
            assert piece.buffers.output is not None
            grown_TD = piece.buffers.output.tensor_TD.float() * 2
            piece.buffers.output = HiddenStates.from_tensor(grown_TD.to(torch.float16))

    monkeypatch.setattr(ModelBlocks, "forward_buffers", overflowing)
    largest = torch.finfo(torch.float16).max
    async with pair.session(("float16", "float16")) as (a, _):
        a.step({0: 2}, torch.full((2, blocks.hidden_size), largest, dtype=torch.float16))
        ended = await a.wire.hear_a(ErrorMessage)
        assert (ended.code, ended.fatal) == ("not_finite", True)
    assert pair.second.reported == []


@pytest.mark.parametrize(("version", "reported"), [((1, 3), []), (VERSION, [(NODE, "wrong")])])
async def test_node_that_pushes_what_is_not_finite_is_reported_if_it_should_have_looked(
    blocks: ModelBlocks, version: tuple[int, int], reported: list[tuple[str, str]]
) -> None:
    async with open_node(blocks) as node:
        owner = node.peer("client")
        owner.open(upstream=NODE)
        await owner.wire.hear_a(Opened)
        owner.link(upstream=NODE)
        await owner.wire.hear_a(Linked)
        up = Peer(node.connect(NODE), blocks, session=owner.session)
        up.epoch, up.lengths = 1, [0]
        up.wire.say(PushOpen(version=version, session=owner.session, secret=owner.secret, epoch=1))
        await up.wire.hear_a(PushOpened)
        up.step({0: 2}, torch.full((2, blocks.hidden_size), float("nan")))
        assert (await up.wire.hear_a(ErrorMessage)).code == "not_finite"
        assert node.reported == reported
        await owner.end()
