"""Reaches the next node of a chain, to push a session's outputs to it."""

from __future__ import annotations

from nesa_node.core.errors import NesaError, PeerUnreachableError, ProtocolError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.span import Span
from nesa_node.swarm.messages import (
    PROTOCOL,
    VERSION,
    Downstream,
    Error,
    Open,
    PushOpen,
    PushOpened,
)
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.stream import Stream, silence_is_loss

NEIGHBOUR_S = 10.0
"""How long neighbours wait for each other while they link up."""


async def dial(
    swarm: Swarm, model_id: ModelId, opened: Open, downstream: Downstream, epoch: int
) -> Stream:
    """A push stream to the next node, whose own record must say that it holds the blocks.

    Raises `ProtocolError("downstream_lost")`.
    """
    peer = PeerId(downstream.peer)
    try:
        record = swarm.directory.record(peer)
        if record is None or not Span(*record.span).covers(Span(*downstream.blocks)):
            await swarm.directory.fetch(model_id)
            record = swarm.directory.record(peer)
        if record is None or record.model_id != model_id:
            raise PeerUnreachableError(f"no valid record of {peer} is known")
        if not Span(*record.span).covers(Span(*downstream.blocks)):
            raise PeerUnreachableError(f"{peer} announces {record.span}")
        reader, writer = await swarm.transport.open_stream(peer, PROTOCOL, record.addresses)
        stream = Stream(peer, reader, writer)
        try:
            await _introduce(stream, opened, epoch)
        except BaseException:
            await stream.close()
            raise
    except (NesaError, OSError) as error:
        raise ProtocolError("downstream_lost", f"{peer}: {error}") from error
    return stream


async def _introduce(stream: Stream, opened: Open, epoch: int) -> None:
    async with silence_is_loss(stream.peer, NEIGHBOUR_S + 2, "opening a push"):
        await stream.send(
            PushOpen(version=VERSION, session=opened.session, secret=opened.secret, epoch=epoch)
        )
        answer, _ = await stream.receive()
    if not isinstance(answer, PushOpened):
        words = answer.message if isinstance(answer, Error) else type(answer).__name__
        raise PeerUnreachableError(f"it answered: {words}")
