"""What every request goes through: an id, and an answer also to what nobody expected."""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nesa_node.api.failures import problem_of

REQUEST_ID = "x-request-id"
_WELL_FORMED = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class Envelope:
    """Gives each response the `x-request-id` of its request, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope.setdefault("state", {})["request_id"] = _request_id(Headers(scope=scope))
        started = False

        async def sent(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            await self._app(scope, receive, sent)
        except Exception as error:
            response = problem_of(error).response()
            if started:
                # Half an answer is no answer: the server closes the connection.
                raise
            await response(scope, receive, sent)


def _request_id(headers: Headers) -> str:
    given = headers.get(REQUEST_ID, "")
    return given if _WELL_FORMED.fullmatch(given) else f"req_{secrets.token_hex(16)}"
