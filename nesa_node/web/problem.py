"""HTTP errors in OpenAI's JSON format, and refusals of requests with an unread body."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    **dict.fromkeys((400, 405, 408, 413, 415, 421, 422), "invalid_request_error"),
}


class HttpProblem(Exception):
    """HTTP error of a request. `message` says what failed, where, and what to do."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": _ERROR_TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def invalid_request(
    message: str, *, param: str | None = None, code: str = "invalid_value"
) -> HttpProblem:
    """HTTP error 400 of a request; `param` is the field that is wrong."""
    return HttpProblem(400, message, code=code, param=param)


DISCARD_TIMEOUT_S = 2.0
MAX_DISCARDED_BYTES = 64 * 2**20


async def send_refusal(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Send a complete `response` and close the connection if the request has a body.

    A client that is still sending would lose the response if the connection closed at once. So its
    body is discarded first, for at most `DISCARD_TIMEOUT_S` seconds and `MAX_DISCARDED_BYTES`.
    """
    headers = Headers(scope=scope)
    if "transfer-encoding" not in headers and headers.get("content-length", "0") == "0":
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
        async with asyncio.timeout(DISCARD_TIMEOUT_S):
            await _discard_body(receive)
    for message in last:
        await send(message)


def send_with_headers(send: Send, headers: Mapping[str, str], *, override: bool = True) -> Send:
    """`send` that adds headers; without `override` the response's own are kept."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            found = MutableHeaders(scope=message)
            for name, value in headers.items():
                if override or name not in found:
                    found[name] = value
        await send(message)

    return sent


async def _discard_body(receive: Receive) -> None:
    seen = 0
    while seen < MAX_DISCARDED_BYTES:
        message = await receive()
        seen += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body", False):
            return
