"""Request ids: taken from the client or generated, and returned in the response."""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = "x-request-id"
_WELL_FORMED = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class RequestIds:
    """ASGI middleware that sets `scope["state"]["request_id"]` and the response header."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        if "request_id" in state:
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        name = given if _WELL_FORMED.fullmatch(given) else f"req_{secrets.token_hex(16)}"
        state["request_id"] = name

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = name
            await send(message)

        await self._app(scope, receive, sent)
