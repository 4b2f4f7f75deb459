"""The first words on a stream that a peer opened: what it wants, or why it does not get it."""

from __future__ import annotations

import asyncio

from nesa_node.core.errors import BusyError, FrameError, ProtocolError
from nesa_node.core.logging import get_logger
from nesa_node.swarm.messages import AnyMessage, Busy, Error
from nesa_node.swarm.stream import Stream

log = get_logger(__name__)

FIRST_MESSAGE_S = 10.0


async def first_message(stream: Stream) -> AnyMessage:
    """Raises `FrameError` if nothing comes."""
    try:
        async with asyncio.timeout(FIRST_MESSAGE_S):
            message, _ = await stream.receive()
    except TimeoutError:
        raise FrameError(f"nothing came for {FIRST_MESSAGE_S:.0f} s") from None
    return message


async def refuse(stream: Stream, error: ProtocolError, *, free_tokens: int = 0) -> None:
    """Tell the peer why; silent about one that does not listen."""
    try:
        async with asyncio.timeout(FIRST_MESSAGE_S):
            if isinstance(error, BusyError):
                await stream.send(
                    Busy(
                        retry_after_s=error.retry_after_s,
                        free_tokens=free_tokens,
                        message=str(error)[:1024],
                    )
                )
            else:
                await stream.send(Error(code=error.code, message=str(error)[:2048]))
    except (ProtocolError, TimeoutError):
        log.debug("refusal_not_delivered", peer=stream.peer)
