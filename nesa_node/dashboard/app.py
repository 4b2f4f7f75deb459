"""The web application: GET /topology.json and /healthz, for browsers that mean us."""

from __future__ import annotations

from fastapi import FastAPI, Response
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nesa_node.core.http_address import HttpAddress
from nesa_node.dashboard.page import TopologyPage

_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
)


def make_app(page: TopologyPage, address: HttpAddress) -> ASGIApp:
    """Answers only to names that `address` has; never in HTML."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    @app.get("/healthz")
    async def healthz() -> Response:
        return Response(b'{"status":"ok"}', media_type="application/json")

    @app.get("/topology.json")
    async def topology() -> Response:
        return Response(await page.json(), media_type="application/json")

    return Guard(app, address)


class Guard:
    """Refuses what a strange page could make a browser ask for, and says how to treat answers."""

    def __init__(self, app: ASGIApp, address: HttpAddress) -> None:
        self._app = app
        self._address = address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        hosts = Headers(scope=scope).getlist("host")
        if len(hosts) != 1 or not self._address.answers_to(hosts[0]):
            refusal = PlainTextResponse("this page does not go by that name\n", status_code=421)
            await refusal(scope, receive, _guarded(send))
            return
        await self._app(scope, receive, _guarded(send))


def _guarded(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
        await send(message)

    return sent
