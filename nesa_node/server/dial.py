"""Reaches another node about a session: to push outputs to it, or to hand the session over."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nesa_node.core.errors import NesaError, NoAddressError, PeerUnreachableError, ProtocolError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.logging import get_logger
from nesa_node.core.span import Span
from nesa_node.swarm.directory import Directory
from nesa_node.swarm.messages import (
    PROTOCOL,
    VERSION,
    Downstream,
    Error,
    Open,
    PushOpen,
    PushOpened,
    TransferOpen,
    TransferOpened,
)
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.records import NodeRecord
from nesa_node.swarm.stream import Stream, silence_is_loss
from nesa_node.swarm.wire import Wire, speed_to

log = get_logger(__name__)

NEIGHBOUR_S = 10.0
"""How long neighbours wait for each other while they link up."""
NOT_REACHED = "this node could not reach the next one, or was refused there; its log says why"


async def dial(
    swarm: Swarm, model_id: ModelId, opened: Open, downstream: Downstream, epoch: int
) -> tuple[Stream, Wire]:
    """A push stream to the next node. Raises `ProtocolError("downstream_lost")`."""
    introduction = PushOpen(
        version=VERSION, session=opened.session, secret=opened.secret, epoch=epoch
    )
    stream, answer = await _reach(swarm, model_id, downstream, introduction, PushOpened)
    codecs = answer.codecs if isinstance(answer, PushOpened) else ()
    try:
        speed = await speed_to(swarm, stream.peer, opened.quality)
    except BaseException:
        await stream.close()
        raise
    return stream, Wire(opened.quality, codecs, speed)


async def dial_successor(
    swarm: Swarm, model_id: ModelId, opened: Open, successor: Downstream
) -> Stream:
    """A stream to whom the session goes. Raises `ProtocolError("downstream_lost")`."""
    introduction = TransferOpen(version=VERSION, session=opened.session, secret=opened.secret)
    stream, _ = await _reach(swarm, model_id, successor, introduction, TransferOpened)
    return stream


async def _reach(
    swarm: Swarm,
    model_id: ModelId,
    whom: Downstream,
    introduction: PushOpen | TransferOpen,
    welcome: type[PushOpened | TransferOpened],
) -> tuple[Stream, PushOpened | TransferOpened]:
    """A stream to a peer whose own record must say that it holds the blocks, and its answer."""
    peer = PeerId(whom.peer)
    try:
        record = await _record_of(swarm.directory, model_id, whom)
        if record is None or record.model_id != model_id:
            raise PeerUnreachableError(f"no valid record of {peer} is known")
        if not Span(*record.span).covers(Span(*whom.blocks)):
            raise PeerUnreachableError(f"{peer} announces {record.span}")
        stream = await _stream_to(swarm, model_id, peer, record.addresses)
        try:
            answer = await _introduce(stream, introduction, welcome)
        except BaseException:
            await stream.close()
            raise
    except (NesaError, OSError) as error:
        # What came of dialling addresses that a stranger announced is no stranger's to know.
        log.info("neighbour_not_reached", peer=peer, reason=str(error))
        raise ProtocolError("downstream_lost", NOT_REACHED) from error
    return stream, answer


async def _record_of(
    directory: Directory, model_id: ModelId, whom: Downstream
) -> NodeRecord | None:
    """The newest record of a peer, looked up if what is known says of other blocks or nothing.

    First with the member of the DHT that answers first: a whole look waits seconds for those that
    are gone, likely the very node whose place the peer takes.
    """

    def known() -> NodeRecord | None:
        record = directory.record(PeerId(whom.peer))
        fits = record is not None and Span(*record.span).covers(Span(*whom.blocks))
        return record if fits else None

    if known() is None:
        await directory.glance_soon(model_id)
    if known() is None:
        await directory.fetch(model_id)
    return directory.record(PeerId(whom.peer))


async def _stream_to(
    swarm: Swarm, model_id: ModelId, peer: PeerId, addresses: Sequence[str]
) -> Stream:
    """Raises `PeerUnreachableError`. A peer that this node itself knew as alive is reported.

    A client chooses who dials whom, when and how often: that alone accuses no peer.
    """
    was_near = not math.isnan(swarm.distances.rtt_ms(peer))
    try:
        reader, writer = await swarm.transport.open_stream(peer, PROTOCOL, addresses)
    except NoAddressError:
        raise
    except PeerUnreachableError:
        if was_near and not await swarm.transport.is_connected(peer):
            swarm.reporter.note(model_id, peer, "lost")
        raise
    return Stream(peer, reader, writer)


async def _introduce(
    stream: Stream,
    introduction: PushOpen | TransferOpen,
    welcome: type[PushOpened | TransferOpened],
) -> PushOpened | TransferOpened:
    async with silence_is_loss(stream.peer, NEIGHBOUR_S + 2, "opening a stream between nodes"):
        await stream.send(introduction)
        answer, _ = await stream.receive()
    if not isinstance(answer, welcome):
        words = answer.message if isinstance(answer, Error) else type(answer).__name__
        raise PeerUnreachableError(f"it answered: {words}")
    return answer
