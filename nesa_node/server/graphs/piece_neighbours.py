"""Streams to the nodes that compute what follows, which values are sent to directly."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

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
from nesa_node.swarm.protocol.graph_messages import ALIGNMENT, GraphValues, TargetNode
from nesa_node.swarm.protocol.graph_values import encode_values
from nesa_node.swarm.protocol.stream import Stream

log = get_logger(__name__)

MAX_NEIGHBOURS = 64
BUSY_RETRY_S = 5.0


class _Link:
    """A stream that opens, or is open."""

    def __init__(self) -> None:
        self.ready: asyncio.Future[tuple[Stream, int]] = asyncio.get_running_loop().create_future()
        """The stream, and the most bytes that its node takes."""
        self.users = 0
        """Calls that send, or wait for it."""
        self.task: asyncio.Task[None] | None = None


class PieceNeighbours:
    """One stream to each neighbour, opened when it is first needed and kept until it ends."""

    def __init__(self, swarm: Swarm, model_id: ModelId) -> None:
        """The caller closes it."""
        self._lookup = NeighbourLookup(swarm, model_id)
        self._links: dict[PeerId, _Link] = {}
        """The least recently used first."""
        self._tasks = TaskSet()

    async def close(self) -> None:
        await self._tasks.close()
        await self._lookup.close()

    async def send(self, target: TargetNode, values: Mapping[int, Tensor]) -> None:
        """Send values of a request to a neighbour.

        Raises `ProtocolError`: "downstream_lost" where it is not reached, "too_large" for more
        than it takes; and `BusyError` for too many neighbours. A cancelled call sends all the same,
        because half a message would end the stream for the next requests.
        """
        sending = asyncio.ensure_future(self._send(target, values))
        await wait_until_done(sending)
        sending.result()

    async def _send(self, target: TargetNode, values: Mapping[int, Tensor]) -> None:
        link = self._find_link(target)
        link.users += 1
        try:
            stream, max_bytes = await asyncio.shield(link.ready)
            nbytes = sum(tensor.nbytes + ALIGNMENT for tensor in values.values())
            if nbytes > max_bytes:
                raise ProtocolError(
                    "too_large", f"{nbytes} bytes for {target.node.peer}, which takes {max_bytes}"
                )
            metas, payload = await asyncio.to_thread(encode_values, values)
            try:
                await stream.send(GraphValues(key=target.key, values=metas), payload)
            except StreamClosedError as error:
                stream.abort()  # half a message may have been sent
                log.info("neighbour_lost", peer=target.node.peer, reason=str(error))
                raise ProtocolError("downstream_lost", NOT_REACHED_MESSAGE) from None
        finally:
            link.users -= 1

    def _find_link(self, target: TargetNode) -> _Link:
        peer = PeerId(target.node.peer)
        link = self._links.pop(peer, None)
        if link is None:
            self._make_room()
            link = _Link()
            link.task = self._tasks.start(self._hold_link(target, link), name="graph-neighbour")
            if link.task is None:
                raise ProtocolError("downstream_lost", "this node is leaving")
        self._links[peer] = link
        return link

    def _make_room(self) -> None:
        """Close the least recently used link that is idle, where there are too many."""
        if len(self._links) < MAX_NEIGHBOURS:
            return
        for peer, link in self._links.items():
            if not link.users:
                del self._links[peer]
                assert link.task is not None
                link.task.cancel()
                return
        raise BusyError("this node sends to too many others", BUSY_RETRY_S)

    async def _hold_link(self, target: TargetNode, link: _Link) -> None:
        peer = PeerId(target.node.peer)
        try:
            stream, opened = await dial_pieces(self._lookup, target.node)
            try:
                link.ready.set_result((stream, opened.max_bytes))
                while True:
                    await stream.receive()
            finally:
                await stream.close()
        except NesaError as error:
            if not link.ready.done():
                link.ready.set_exception(error)
                link.ready.exception()  # is seen, also where the request is gone
        finally:
            if not link.ready.done():
                link.ready.set_exception(ProtocolError("downstream_lost", NOT_REACHED_MESSAGE))
                link.ready.exception()
            if self._links.get(peer) is link:
                del self._links[peer]
