"""The gateway as a web application: OpenAI's API over the models of a swarm."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.routing import Mount, Route
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
    for endpoint in _ENDPOINTS:
        app.include_router(endpoint.router)
    if metrics is not None:
        app.router.routes.append(Route("/metrics", _Whole(metrics), include_in_schema=False))
    if pages is not None:
        app.router.routes.append(Mount("/", pages))
    return app


class _Whole:
    """An application as an endpoint: a plain function would be taken for a handler of requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
