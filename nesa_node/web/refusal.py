"""Refusals that reach the client although its request's body was not read."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

LINGER_S = 2.0
LINGER_BYTES = 64 * 2**20


async def refuse(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Send a complete `response` and close the connection if the request has a body.

    A client that is still sending would lose the response if the connection closed at once. So its
    body is discarded first, for at most `LINGER_S` seconds and `LINGER_BYTES`.
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
