"""Push stream on which a node of a chain sends its outputs to the next one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from nesa_node.core.errors import ProtocolError, StreamClosedError
from nesa_node.core.logging import get_logger
from nesa_node.swarm.messages import Error, Received, Step
from nesa_node.swarm.stream import Stream
from nesa_node.swarm.wire import Wire

log = get_logger(__name__)

OnLost = Callable[[str], Awaitable[None]]


class Push:
    """Sends until the downstream is lost or refuses; then calls `on_lost(reason)` once."""

    def __init__(self, stream: Stream, wire: Wire, on_lost: OnLost) -> None:
        self.lost = False
        self.stream = stream
        self._wire = wire
        self._on_lost = on_lost

    @property
    def settled(self) -> bool:
        return self.lost or self.stream.settled

    async def send(self, step: Step, payload: memoryview | bytes | bytearray) -> None:
        """Send a step. Does nothing for a lost downstream, since the sender keeps its outputs for
        replay.
        """
        if self.lost:
            return
        try:
            await self.stream.send(step, payload)
        except StreamClosedError as error:
            await self._lose(str(error))

    async def watch(self) -> None:
        """Read the downstream's messages: arrival reports, or a refusal.

        At most one report per message sent; more is a flood that its client has not paid for.
        """
        told = 0
        try:
            message, _ = await self.stream.receive()
            while isinstance(message, Received):
                told += 1
                if told > self.stream.messages_sent:
                    raise ProtocolError("unexpected", "it tells of messages that were not sent")
                self._wire.note(message)
                if self.stream.unread:
                    await asyncio.sleep(0)
                message, _ = await self.stream.receive()
            words = message.message if isinstance(message, Error) else type(message).__name__
            await self._lose(f"it answered: {words}")
        except ProtocolError as error:
            await self._lose(str(error))

    def leave(self) -> None:
        """Stop sending and abort a send in progress."""
        self.lost = True
        self.stream.abort()

    async def _lose(self, reason: str) -> None:
        if not self.lost:
            self.lost = True
            log.info("downstream_lost", peer=self.stream.peer, reason=reason)
            await self._on_lost(reason)


@asynccontextmanager
async def open_push(stream: Stream, wire: Wire, on_lost: OnLost) -> AsyncIterator[Push]:
    """Open a push over `stream`, which is closed on exit."""
    push = Push(stream, wire, on_lost)
    watcher = asyncio.create_task(push.watch())
    try:
        yield push
    finally:
        watcher.cancel()
        try:
            await asyncio.gather(watcher, return_exceptions=True)
        finally:
            await stream.close()
