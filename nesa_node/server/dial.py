"""Reaches another node about a session: to push outputs to it, or to hand the session over."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence

from nesa_node.core.errors import NesaError, NoAddressError, PeerUnreachableError, ProtocolError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.logging import get_logger
from nesa_node.core.span import Span
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


GLANCE_PAUSE_S = 0.5
LOOK_PAUSE_S = 2.0
"""Between two looks for peers that were not found: clients may name peers that there are not."""


class NeighbourLookup:
    """Finds the records of the peers that clients name, for all sessions of a node."""

    def __init__(self, swarm: Swarm, model_id: ModelId) -> None:
        self.swarm = swarm
        self.model_id = model_id
        self._glance = _SharedLook(lambda: swarm.directory.glance_soon(model_id), GLANCE_PAUSE_S)
        self._look = _SharedLook(lambda: swarm.directory.fetch(model_id), LOOK_PAUSE_S)

    async def record_of(self, neighbour: Downstream) -> NodeRecord | None:
        """The newest record of a peer, looked up if what is known says of other blocks or nothing.

        First with the member of the DHT that answers first: a whole look waits seconds for those
        that are gone, likely the very node whose place the peer takes.
        """
        directory = self.swarm.directory

        def is_known() -> bool:
            record = directory.record(PeerId(neighbour.peer))
            return record is not None and Span(*record.span).covers(Span(*neighbour.blocks))

        asked_at = time.monotonic()
        await self._glance.until(is_known, asked_at)
        await self._look.until(is_known, asked_at)
        return directory.record(PeerId(neighbour.peer))

    def close(self) -> None:
        """End the looks that are under way; no session waits for them any more."""
        self._glance.close()
        self._look.close()


class _SharedLook:
    """Calls at the same time share one look; looks that found nothing are `pause_s` apart.

    A look is a task of its own: it goes on for all others if the session that began it ends.
    """

    def __init__(self, look: Callable[[], Awaitable[object]], pause_s: float) -> None:
        self._look = look
        self._pause_s = pause_s
        self._running: asyncio.Task[None] | None = None
        self._began_at = -math.inf
        """Of the last look that has ended."""
        self._next_at = -math.inf

    async def until(self, is_found: Callable[[], bool], asked_at: float) -> None:
        """Look, unless a look that began after `asked_at` has been in vain."""
        while not is_found() and self._began_at <= asked_at:
            if self._running is None or self._running.done():
                self._running = asyncio.create_task(self._look_once(), name="neighbour-look")
            await asyncio.shield(self._running)
            if is_found():
                self._next_at = -math.inf

    async def _look_once(self) -> None:
        await asyncio.sleep(self._next_at - time.monotonic())
        began_at = time.monotonic()
        self._next_at = began_at + self._pause_s
        try:
            await self._look()
        except NesaError as error:
            log.warning("neighbour_look_failed", error=str(error))
        self._began_at = began_at

    def close(self) -> None:
        if self._running is not None:
            self._running.cancel()


async def dial(
    lookup: NeighbourLookup, opened: Open, downstream: Downstream, epoch: int
) -> tuple[Stream, Wire]:
    """A push stream to the next node. Raises `ProtocolError("downstream_lost")`."""
    introduction = PushOpen(
        version=VERSION, session=opened.session, secret=opened.secret, epoch=epoch
    )
    stream, answer = await _reach(lookup, downstream, introduction, PushOpened)
    codecs = answer.codecs if isinstance(answer, PushOpened) else ()
    try:
        speed = await speed_to(lookup.swarm, stream.peer, opened.quality)
    except BaseException:
        await stream.close()
        raise
    return stream, Wire(opened.quality, codecs, speed)


async def dial_successor(lookup: NeighbourLookup, opened: Open, successor: Downstream) -> Stream:
    """A stream to the session's next holder. Raises `ProtocolError("downstream_lost")`."""
    introduction = TransferOpen(version=VERSION, session=opened.session, secret=opened.secret)
    stream, _ = await _reach(lookup, successor, introduction, TransferOpened)
    return stream


async def _reach(
    lookup: NeighbourLookup,
    neighbour: Downstream,
    introduction: PushOpen | TransferOpen,
    welcome: type[PushOpened | TransferOpened],
) -> tuple[Stream, PushOpened | TransferOpened]:
    """A stream to a peer whose own record must say that it holds the blocks, and its answer."""
    peer = PeerId(neighbour.peer)
    try:
        record = await lookup.record_of(neighbour)
        if record is None or record.model_id != lookup.model_id:
            raise PeerUnreachableError(f"no valid record of {peer} is known")
        if not Span(*record.span).covers(Span(*neighbour.blocks)):
            raise PeerUnreachableError(f"{peer} announces {record.span}")
        stream = await _stream_to(lookup, peer, record.addresses)
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


async def _stream_to(lookup: NeighbourLookup, peer: PeerId, addresses: Sequence[str]) -> Stream:
    """Raises `PeerUnreachableError`. A peer that this node itself knew as alive is reported.

    A client chooses which peers a node dials, when and how often: that alone accuses no peer.
    """
    swarm = lookup.swarm
    was_near = not math.isnan(swarm.distances.rtt_ms(peer))
    try:
        reader, writer = await swarm.transport.open_stream(peer, PROTOCOL, addresses)
    except NoAddressError:
        raise
    except PeerUnreachableError:
        if was_near and not await swarm.transport.is_connected(peer):
            swarm.reporter.note(lookup.model_id, peer, "lost")
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
