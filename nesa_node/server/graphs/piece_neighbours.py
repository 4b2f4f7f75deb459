"""Streams to the nodes that compute what follows, which values are sent to directly."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from nesa_node.core.errors import BusyError, NesaError, ProtocolError, StreamClosedError
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.logging import get_logger
from nesa_node.server.session.neighbours import (
    NOT_REACHED_MESSAGE,
    NeighbourLookup,
    dial_pieces,
)
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.tasks import TaskSet, wait_until_done
from nesa_node.swarm.protocol.graph_messages import GraphValues
from nesa_node.swarm.protocol.graph_values import encode_values
from nesa_node.swarm.protocol.messages import Downstream
from nesa_node.swarm.protocol.stream import Stream

log = get_logger(__name__)

MAX_NEIGHBOURS = 64
BUSY_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class _Link:
    stream: Stream
    max_bytes: int


class PieceNeighbours:
    """One stream to each neighbour, opened when it is first needed and kept until it ends."""

    def __init__(self, swarm: Swarm, model_id: ModelId) -> None:
        """The caller closes it."""
        self._lookup = NeighbourLookup(swarm, model_id)
        self._links: dict[PeerId, asyncio.Future[_Link]] = {}
        self._tasks = TaskSet()

    async def close(self) -> None:
        await self._tasks.close()
        await self._lookup.close()

    async def send(self, node: Downstream, key: bytes, values: Mapping[int, Tensor]) -> None:
        """Send values of a request to a neighbour.

        Raises `ProtocolError`: "downstream_lost" where it is not reached, "too_large" for more
        than it takes; and `BusyError` for too many neighbours. A cancelled call sends all the same,
        because half a message would end the stream for the next requests.
        """
        sending = asyncio.ensure_future(self._send(node, key, values))
        await wait_until_done(sending)
        sending.result()

    async def _send(self, node: Downstream, key: bytes, values: Mapping[int, Tensor]) -> None:
        metas, payload = await asyncio.to_thread(encode_values, values)
        link = await self._find_link(node)
        if len(payload) > link.max_bytes:
            raise ProtocolError(
                "too_large", f"{len(payload)} bytes for {node.peer}, which takes {link.max_bytes}"
            )
        try:
            await link.stream.send(GraphValues(key=key, values=metas), payload)
        except StreamClosedError as error:
            log.info("neighbour_lost", peer=node.peer, reason=str(error))
            raise ProtocolError("downstream_lost", NOT_REACHED_MESSAGE) from None

    async def _find_link(self, node: Downstream) -> _Link:
        peer = PeerId(node.peer)
        if peer not in self._links:
            if len(self._links) >= MAX_NEIGHBOURS:
                raise BusyError("this node sends to too many others", BUSY_RETRY_S)
            self._links[peer] = asyncio.get_running_loop().create_future()
            self._tasks.start(self._hold_link(node, self._links[peer]), name="graph-neighbour")
        return await asyncio.shield(self._links[peer])

    async def _hold_link(self, node: Downstream, ready: asyncio.Future[_Link]) -> None:
        try:
            stream, opened = await dial_pieces(self._lookup, node)
            try:
                ready.set_result(_Link(stream, opened.max_bytes))
                while True:
                    await stream.receive()
            finally:
                await stream.close()
        except NesaError as error:
            if not ready.done():
                ready.set_exception(error)
                ready.exception()  # is seen, also where the request is gone
        finally:
            ready.cancel()
            del self._links[PeerId(node.peer)]
