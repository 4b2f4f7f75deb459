"""Streams to neighbour nodes of a session: to push outputs, or to hand the session over."""

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
"""Longest wait of neighbours for each other while they are linked."""
NOT_REACHED = "this node could not reach the next one, or was refused there; its log says why"


GLANCE_PAUSE_S = 0.5
LOOK_PAUSE_S = 2.0
"""Least time between two lookups that found nothing: clients may name peers that do not exist."""


class NeighbourLookup:
    """Finds the records of peers that clients name, for all sessions of a node."""

    def __init__(self, swarm: Swarm, model_id: ModelId) -> None:
        self.swarm = swarm
        self.model_id = model_id
        self._glance = _SharedLook(lambda: swarm.directory.glance_soon(model_id), GLANCE_PAUSE_S)
        self._look = _SharedLook(lambda: swarm.directory.fetch(model_id), LOOK_PAUSE_S)

    async def record_of(self, neighbour: Downstream) -> NodeRecord | None:
        """The newest record of a peer; fetched if the known one does not cover the blocks, or there
        is none.

        Asks the fastest DHT member first: a full fetch waits seconds for members that are gone,
        possibly the very node that the peer replaces.
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
        """Cancel the lookups in progress."""
        self._glance.close()
        self._look.close()


class _SharedLook:
    """Single-flight lookup: concurrent calls share one fetch, and fruitless fetches are `pause_s`
    apart.

    Each fetch is its own task, so it continues when the session that began it ends.
    """

    def __init__(self, look: Callable[[], Awaitable[object]], pause_s: float) -> None:
        self._look = look
        self._pause_s = pause_s
        self._running: asyncio.Task[None] | None = None
        self._began_at = -math.inf
        """Start of the last fetch that has ended."""
        self._next_at = -math.inf

    async def until(self, is_found: Callable[[], bool], asked_at: float) -> None:
        """Fetch until found, or until a fetch that began after `asked_at` has found nothing."""
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
            log.warning("neighbour_lookup_failed", error=str(error))
        self._began_at = began_at

    def close(self) -> None:
        if self._running is not None:
            self._running.cancel()


async def dial(
    lookup: NeighbourLookup, opened: Open, downstream: Downstream, epoch: int
) -> tuple[Stream, Wire]:
    """Open a push stream to the next node. Raises `ProtocolError("downstream_lost")`."""
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
    """Open a stream to the session's successor. Raises `ProtocolError("downstream_lost")`."""
    introduction = TransferOpen(version=VERSION, session=opened.session, secret=opened.secret)
    stream, _ = await _reach(lookup, successor, introduction, TransferOpened)
    return stream


async def _reach(
    lookup: NeighbourLookup,
    neighbour: Downstream,
    introduction: PushOpen | TransferOpen,
    welcome: type[PushOpened | TransferOpened],
) -> tuple[Stream, PushOpened | TransferOpened]:
    """Open a stream to a peer with a record that covers the blocks, and return its answer."""
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
        # The client must not learn the result of dialling addresses that another peer announced.
        log.info("neighbour_not_reached", peer=peer, reason=str(error))
        raise ProtocolError("downstream_lost", NOT_REACHED) from error
    return stream, answer


async def _stream_to(lookup: NeighbourLookup, peer: PeerId, addresses: Sequence[str]) -> Stream:
    """Open a stream to `peer`, and report it if this node itself knew it as alive.

    Raises `PeerUnreachableError`. A client chooses which peers a node dials, and how often: its
    choice alone accuses no peer.
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
