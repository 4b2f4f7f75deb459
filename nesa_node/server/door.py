"""Listener for incoming streams, independent of the span that the node serves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from nesa_node.core.errors import ProtocolError, StreamClosedError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.server.greeting import first_message, refuse
from nesa_node.server.session_server import SessionServer
from nesa_node.swarm.stream import Stream

log = get_logger(__name__)


class Door:
    """Routes streams to the current span's server; refuses them (`draining`) between two spans."""

    def __init__(self) -> None:
        self._server: SessionServer | None = None

    @contextmanager
    def leading_to(self, server: SessionServer) -> Iterator[None]:
        self._server = server
        try:
            yield
        finally:
            self._server = None

    async def handle(
        self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one incoming stream until its final message; the caller closes it."""
        if self._server is not None:
            await self._server.handle(peer, reader, writer)
            return
        stream = Stream(peer, reader, writer)
        try:
            # Read before it is refused: see `SessionServer.handle`.
            await first_message(stream)
            await refuse(stream, ProtocolError("draining", "this node is changing its blocks"))
        except StreamClosedError:
            log.debug("stream_ended", peer=peer)
        except ProtocolError as error:
            await refuse(stream, error)
