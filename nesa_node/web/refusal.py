"""Saying no to a request before its body was read, so that the answer arrives."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

LINGER_S = 2.0
LINGER_BYTES = 64 * 2**20


async def refuse(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Send `response`, whose body is in it, instead of what was asked for.

    Somebody who is still sending a body would not read the answer, and would lose it if we closed
    the connection at once. So what comes is thrown away, for a moment and up to a size; then the
    connection ends, since nobody can hold one open by going on.
    """
    if not _has_body(Headers(scope=scope)):
        await response(scope, receive, send)
        return
    response.headers["connection"] = "close"
    last: list[Message] = []

    async def hold_back_the_end(message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            last.append({**message, "body": b""})
            message = {**message, "more_body": True}
        await send(message)

    await response(scope, receive, hold_back_the_end)
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            await _throw_away(receive)
    for message in last:
        await send(message)


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


async def _throw_away(receive: Receive) -> None:
    seen = 0
    while seen < LINGER_BYTES:
        message = await receive()
        seen += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body", False):
            return
