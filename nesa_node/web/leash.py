"""Ends an answer that is still being written when its caller's key has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Leash:
    """To the application it looks as if the client had left, to the client as if that were all.

    `holds` is asked whenever something is sent: a page's feed would else go on for ever.
    """

    def __init__(self, holds: Callable[[], bool], receive: Receive, send: Send) -> None:
        self._holds = holds
        self._receive = receive
        self._send = send
        self._let_go = asyncio.Event()
        self._unfinished = False

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        await app(scope, self._received, self._sent)
        if self._let_go.is_set() and self._unfinished:
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
        if message["type"] == "http.response.body":
            self._unfinished = bool(message.get("more_body", False))
            if self._unfinished and not self._holds():
                self._let_go.set()
                return
        await self._send(message)
