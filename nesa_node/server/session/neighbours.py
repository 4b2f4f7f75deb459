"""Streams to neighbour nodes: to push outputs, to hand a session over, or for values of pieces."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from nesa_node.core.errors import NesaError, NoAddressError, PeerUnreachableError, ProtocolError
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.swarm.dht.records import NodeRecord
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.identity import adapter_proof
from nesa_node.swarm.p2p.tasks import SharedCall
from nesa_node.swarm.protocol.graph_messages import GRAPH_PROTOCOL, GraphOpen, GraphOpened
from nesa_node.swarm.protocol.link_encoder import LinkEncoder, get_link_speed
from nesa_node.swarm.protocol.messages import (
    PROTOCOL,
    VERSION,
    Downstream,
    ErrorMessage,
    Open,
    PushOpen,
    PushOpened,
    TransferOpen,
    TransferOpened,
)
from nesa_node.swarm.protocol.stream import Stream, peer_timeout

log = get_logger(__name__)

Welcome = TypeVar("Welcome", PushOpened, TransferOpened, GraphOpened)

NEIGHBOUR_TIMEOUT_S = 10.0
"""Longest wait of neighbours for each other while they are linked."""
NOT_REACHED_MESSAGE = (
    "this node could not reach the next one, or was refused there; its log says why"
)


QUICK_LOOKUP_INTERVAL_S = 0.5
FULL_LOOKUP_INTERVAL_S = 2.0
"""Least time between two lookups that found nothing: clients may name peers that do not exist."""


class NeighbourLookup:
    """Finds the records of peers that clients name, for all sessions of a node."""

    def __init__(self, swarm: Swarm, model_id: ModelId) -> None:
        self.swarm = swarm
        self.model_id = model_id
        directory = swarm.directory
        self._lookups = tuple(
            SharedCall(partial(self._fetch, fetch), pause_s=pause_s)
            for fetch, pause_s in (
                (directory.try_fetch_one, QUICK_LOOKUP_INTERVAL_S),
                (directory.fetch, FULL_LOOKUP_INTERVAL_S),
            )
        )

    async def find_record(self, neighbour: Downstream) -> NodeRecord | None:
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
        for lookup in self._lookups:
            if not is_known():
                await lookup.run_since(asked_at, unless=is_known)
                if is_known():
                    lookup.not_before = -math.inf
        return directory.record(PeerId(neighbour.peer))

    async def _fetch(self, fetch: Callable[[ModelId], Awaitable[object]]) -> None:
        try:
            await fetch(self.model_id)
        except NesaError as error:
            log.warning("neighbour_lookup_failed", error=str(error))

    async def close(self) -> None:
        """Cancel the lookups in progress."""
        for lookup in self._lookups:
            await lookup.close()


async def dial_downstream(
    lookup: NeighbourLookup, opened: Open, downstream: Downstream, epoch: int
) -> tuple[Stream, LinkEncoder]:
    """Open a push stream to the next node. Raises `ProtocolError("downstream_lost")`."""
    introduction = PushOpen(
        version=VERSION, session=opened.session, secret=opened.secret, epoch=epoch
    )
    stream, answer = await _dial_neighbour(lookup, downstream, introduction, PushOpened)
    try:
        speed = await get_link_speed(lookup.swarm, stream.peer, opened.quality)
    except BaseException:
        await stream.close()
        raise
    return stream, LinkEncoder(opened.quality, answer.codecs, speed)


async def dial_successor(
    lookup: NeighbourLookup, opened: Open, successor: Downstream
) -> tuple[Stream, TransferOpened]:
    """Open a stream to the session's successor. Raises `ProtocolError("downstream_lost")`."""
    introduction = TransferOpen(version=VERSION, session=opened.session, secret=opened.secret)
    return await _dial_neighbour(lookup, successor, introduction, TransferOpened)


async def dial_pieces(lookup: NeighbourLookup, neighbour: Downstream) -> tuple[Stream, GraphOpened]:
    """Open a stream for values of pieces. Raises `ProtocolError("downstream_lost")`."""
    swarm, peer = lookup.swarm, PeerId(neighbour.peer)
    proof = adapter_proof(swarm.notices.membership, swarm.transport.peer_id, peer)
    introduction = GraphOpen(version=VERSION, model=lookup.model_id, membership=proof)
    return await _dial_neighbour(
        lookup, neighbour, introduction, GraphOpened, protocol=GRAPH_PROTOCOL
    )


async def _dial_neighbour(
    lookup: NeighbourLookup,
    neighbour: Downstream,
    introduction: PushOpen | TransferOpen | GraphOpen,
    welcome: type[Welcome],
    *,
    protocol: str = PROTOCOL,
) -> tuple[Stream, Welcome]:
    """Open a stream to a peer with a record that covers the blocks, and return its answer."""
    peer = PeerId(neighbour.peer)
    try:
        record = await lookup.find_record(neighbour)
        if record is None or record.model_id != lookup.model_id:
            raise PeerUnreachableError(f"no valid record of {peer} is known")
        if not Span(*record.span).covers(Span(*neighbour.blocks)):
            raise PeerUnreachableError(f"{peer} announces {record.span}")
        stream = await _open_stream(lookup, peer, protocol, record.addresses)
        try:
            async with peer_timeout(
                stream.peer, NEIGHBOUR_TIMEOUT_S + 2, "opening a stream between nodes"
            ):
                await stream.send(introduction)
                answer, _ = await stream.receive()
            if not isinstance(answer, welcome):
                words = (
                    answer.message if isinstance(answer, ErrorMessage) else type(answer).__name__
                )
                raise PeerUnreachableError(f"it answered: {words}")
        except BaseException:
            await stream.close()
            raise
    except (NesaError, OSError) as error:
        # The client must not learn the result of dialling addresses that another peer announced.
        log.info("neighbour_not_reached", peer=peer, reason=str(error))
        raise ProtocolError("downstream_lost", NOT_REACHED_MESSAGE) from error
    return stream, answer


async def _open_stream(
    lookup: NeighbourLookup, peer: PeerId, protocol: str, addresses: Sequence[str]
) -> Stream:
    """Open a stream to `peer`, and report it if this node itself knew it as alive.

    Raises `PeerUnreachableError`. A client chooses which peers a node dials, and how often: its
    choice alone accuses no peer.
    """
    swarm = lookup.swarm
    was_near = not math.isnan(swarm.rtts.rtt_ms(peer))
    try:
        reader, writer = await swarm.transport.open_stream(peer, protocol, addresses)
    except NoAddressError:
        raise
    except PeerUnreachableError:
        if was_near and not await swarm.transport.is_connected(peer):
            swarm.failure_reporter.record_failure(lookup.model_id, peer, "lost")
        raise
    return Stream(peer, reader, writer)
