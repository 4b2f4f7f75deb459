"""Which requests of browsers are meant for us, and what browsers may do with the answers."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nesa_node.core.http_address import HttpAddress

_HEADERS = {
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
}


class Guard:
    """Refuses what a strange page could make a browser ask for, and says how to treat answers.

    Answers only to names that `address` has. A response that sets one of the headers itself, as a
    page with scripts of its own does, keeps its own.
    """

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
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sent
