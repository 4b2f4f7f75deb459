"""The stream on which a chain's node hands its outputs to the next one."""

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
    """Sends until the downstream goes or refuses; then calls `on_lost(reason)`, once."""

    def __init__(self, stream: Stream, wire: Wire, on_lost: OnLost) -> None:
        self.lost = False
        self.stream = stream
        self._wire = wire
        self._on_lost = on_lost

    @property
    def settled(self) -> bool:
        return self.lost or self.stream.settled

    async def send(self, step: Step, payload: memoryview | bytes | bytearray) -> None:
        """Never raises for a downstream that is gone: the sender keeps what it sends anyway."""
        if self.lost:
            return
        try:
            await self.stream.send(step, payload)
        except StreamClosedError as error:
            await self._lose(str(error))

    async def watch(self) -> None:
        """The downstream speaks up to tell how fast messages came, and to refuse something.

        It tells that of each message once: more would be a flood that its client has not paid for.
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
        """Send nothing more, and let go of a send that the downstream does not take."""
        self.lost = True
        self.stream.abort()

    async def _lose(self, reason: str) -> None:
        if not self.lost:
            self.lost = True
            log.info("downstream_lost", peer=self.stream.peer, reason=reason)
            await self._on_lost(reason)


@asynccontextmanager
async def open_push(stream: Stream, wire: Wire, on_lost: OnLost) -> AsyncIterator[Push]:
    """Push over `stream`, which is closed at the end."""
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
