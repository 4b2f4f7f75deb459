"""A small application to stand behind the gate: shaped like OpenAI's, with nothing behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nesa_node.core.settings.addresses import HttpAddress
from nesa_node.core.settings.models import AccessConfig
from nesa_node.web.authenticator import Authenticator
from nesa_node.web.key_store import KeyStore
from nesa_node.web.server import MAX_CONNECTIONS, serve_authenticated

ANY_PORT = HttpAddress("127.0.0.1", 0)
PUBLIC = ("/health", "/static/")


class TinyGateway:
    """`streams` counts those that are open; `go_on` lets them end."""

    def __init__(self) -> None:
        self.streams = 0
        self.go_on = asyncio.Event()
        self.app = Starlette(
            routes=[
                Route("/", self._home),
                Route("/health", self._health),
                Route("/favicon.ico", self._health),
                Route("/static/{name}", self._health),
                Route("/v1/models", self._models),
                Route("/v1/echo", self._echo, methods=["POST"]),
                Route("/v1/spend", self._spend, methods=["POST"]),
                Route("/v1/stream", self._stream, methods=["GET", "POST"]),
                Route("/v1/flood", self._flood),
                Route("/v1/feed", self._feed),
                Route("/v1/whole", self._whole),
                Route("/v1/whoami", self._whoami, methods=["GET", "POST"]),
                Route("/v1/broken", self._broken),
            ]
        )

    async def _home(self, _request: Request) -> Response:
        policy = {"content-security-policy": "default-src 'self'"}
        return HTMLResponse("<title>home</title>", headers=policy)

    async def _health(self, _request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _models(self, _request: Request) -> Response:
        model = {"id": "tiny", "object": "model", "created": 0, "owned_by": "nobody"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _echo(self, request: Request) -> Response:
        body = await request.body()
        return JSONResponse({"bytes": len(body)})

    async def _spend(self, request: Request) -> Response:
        request.state.allowance.spend_tokens(int(await request.body()))
        return JSONResponse({})

    async def _whoami(self, request: Request) -> Response:
        caller = request.state.caller
        return JSONResponse({"id": caller.id, "name": caller.name, "cookie": caller.by_cookie})

    async def _broken(self, _request: Request) -> Response:
        raise RuntimeError("on purpose")

    async def _stream(self, _request: Request) -> Response:
        return StreamingResponse(self._parts())

    async def _feed(self, _request: Request) -> Response:
        return StreamingResponse(self._news(), media_type="text/event-stream")

    async def _whole(self, _request: Request) -> Response:
        return StreamingResponse(self._news(), media_type="application/json")

    async def _news(self) -> AsyncIterator[bytes]:
        self.streams += 1
        try:
            while True:
                yield b"news\n"
                await asyncio.sleep(0.05)
        finally:
            self.streams -= 1

    async def _flood(self, _request: Request) -> Response:
        return StreamingResponse(self._waves())

    async def _waves(self) -> AsyncIterator[bytes]:
        self.streams += 1
        try:
            while True:
                await asyncio.sleep(0)
                yield b"x" * 65_536
        finally:
            self.streams -= 1

    async def _parts(self) -> AsyncIterator[bytes]:
        self.streams += 1
        try:
            yield b"begin\n"
            await self.go_on.wait()
            yield b"end\n"
        finally:
            self.streams -= 1


@asynccontextmanager
async def gate(
    keys_path: Path,
    *,
    address: HttpAddress = ANY_PORT,
    doorman: Authenticator | None = None,
    max_connections: int = MAX_CONNECTIONS,
    **settings: Any,
) -> AsyncIterator[tuple[TinyGateway, HttpAddress]]:
    """The tiny gateway behind a gate with the keys at `keys_path`, listening."""
    gateway = TinyGateway()
    config = AccessConfig(keys_path=keys_path, **settings)
    async with serve_authenticated(
        gateway.app,
        config,
        address,
        public=PUBLIC,
        max_connections=max_connections,
        authenticator=doorman,
    ) as found:
        try:
            yield gateway, found
        finally:
            gateway.go_on.set()


def new_key(keys_path: Path, name: str = "alice", **limits: Any) -> str:
    from nesa_node.web.key_store import KeyLimits

    return KeyStore(keys_path).add(name, KeyLimits(**limits))[1]


def browser(address: HttpAddress, **more: Any) -> httpx.AsyncClient:
    """A client that keeps cookies; nothing of it is a browser's but what tests give as headers."""
    return httpx.AsyncClient(base_url=f"http://{address}", timeout=20, trust_env=False, **more)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
