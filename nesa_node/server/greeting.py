"""Handshake on an incoming stream: its first message, or the refusal of it."""

from __future__ import annotations

import asyncio

from nesa_node.core.errors import BusyError, FrameError, ProtocolError
from nesa_node.core.logging import get_logger
from nesa_node.swarm.messages import AnyMessage, Busy, Error
from nesa_node.swarm.stream import Stream

log = get_logger(__name__)

FIRST_MESSAGE_S = 10.0


async def first_message(stream: Stream) -> AnyMessage:
    """Receive the first message. Raises `FrameError` if none arrives within `FIRST_MESSAGE_S`."""
    try:
        async with asyncio.timeout(FIRST_MESSAGE_S):
            message, _ = await stream.receive()
    except TimeoutError:
        raise FrameError(f"nothing came for {FIRST_MESSAGE_S:.0f} s") from None
    return message


async def refuse(stream: Stream, error: ProtocolError, *, free_tokens: int = 0) -> None:
    """Send the reason of a refusal; does not raise if the peer does not receive it."""
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
