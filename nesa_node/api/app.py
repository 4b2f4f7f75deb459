"""The gateway as a web application: OpenAI's API over the models of a swarm."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from nesa_node import __version__
from nesa_node.api import (
    catalogue,
    chat,
    completions,
    embeddings,
    failures,
    health,
    openapi,
    responses,
    tokens,
)
from nesa_node.api.closing import Closing
from nesa_node.api.gateway import Gateway
from nesa_node.api.models import Models
from nesa_node.core.config import GatewayConfig

_ENDPOINTS = (chat, completions, embeddings, responses, catalogue, tokens, health)


def make_app(
    models: Models,
    config: GatewayConfig,
    *,
    closing: Closing | None = None,
    metrics: ASGIApp | None = None,
    pages: ASGIApp | None = None,
) -> FastAPI:
    """`metrics` answers at /metrics, `pages` whatever is asked for and is no endpoint.

    Whoever ends the application closes `closing` before. Who may ask is not decided here: put it
    behind what does.
    """
    app = FastAPI(
        title="nesa-node",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.gateway = Gateway(models, config, closing or Closing())
    failures.install(app)
    openapi.install(app)
    app.add_middleware(_Heads)
    for endpoint in _ENDPOINTS:
        app.include_router(endpoint.router)
    if metrics is not None:
        app.router.routes.append(Route("/metrics", _Whole(metrics), include_in_schema=False))
    if pages is not None:
        # No mount at "/": that would also answer wrong methods of our own paths.
        app.router.default = _Fallback(pages, app.router.default)
    return app


class _Heads:
    """HEAD, as health checks send it, is GET: the server leaves the body out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class _Fallback:
    """Pages for whatever is no endpoint; who mistakes an endpoint's path is told as a program."""

    def __init__(self, pages: ASGIApp, nothing: ASGIApp) -> None:
        self._pages = pages
        self._nothing = nothing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ours = scope["type"] == "http" and scope["path"].startswith("/v1/")
        await (self._nothing if ours else self._pages)(scope, receive, send)


class _Whole:
    """An application as an endpoint: a plain function would be taken for a handler of requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
