"""Ends a response in progress when the caller's key is revoked or expires."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Leash:
    """Runs an application as long as `holds()`, which is checked at every chunk of the response.

    After that the application sees a disconnect. A stream ends normally for its client; any other
    response is cut by closing the connection, so that it does not look complete.
    """

    def __init__(self, holds: Callable[[], bool], receive: Receive, send: Send) -> None:
        self._holds = holds
        self._receive = receive
        self._send = send
        self._let_go = asyncio.Event()
        self._unfinished = False
        self._is_stream = False

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        await app(scope, self._received, self._sent)
        if self._let_go.is_set() and self._unfinished and self._is_stream:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _received(self) -> Message:
        getting = asyncio.ensure_future(self._receive())
        waiting = asyncio.ensure_future(self._let_go.wait())
        both = (getting, waiting)
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            return {"type": "http.disconnect"} if waiting.done() else getting.result()
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _sent(self, message: Message) -> None:
        if self._let_go.is_set():
            return
        if message["type"] == "http.response.start":
            kind = Headers(raw=message["headers"]).get("content-type", "")
            self._is_stream = kind.startswith("text/event-stream")
        if message["type"] == "http.response.body":
            self._unfinished = bool(message.get("more_body", False))
            if self._unfinished and not self._holds():
                self._let_go.set()
                return
        await self._send(message)
