"""ASGI application of the gateway: OpenAI's API for the models of a swarm."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from nesa_node import __version__
from nesa_node.api.endpoints import (
    chat,
    completions,
    embeddings,
    gateway_info,
    images,
    responses,
    tokenization,
    transcriptions,
)
from nesa_node.api.gateway import Gateway
from nesa_node.api.models.networks import NetworkRegistry
from nesa_node.api.models.registry import ModelRegistry
from nesa_node.api.models.sandbox import GrammarChecker, TemplateRenderer
from nesa_node.api.openapi import install_openapi
from nesa_node.api.responses.http_responses import install_error_handlers
from nesa_node.api.responses.in_flight import GracefulShutdown, ResponseMemory
from nesa_node.core.settings.models import GatewayConfig

_ENDPOINT_MODULES = (
    chat,
    completions,
    embeddings,
    images,
    responses,
    gateway_info,
    tokenization,
    transcriptions,
)


def make_app(
    models: ModelRegistry,
    config: GatewayConfig,
    *,
    grammars: GrammarChecker,
    templates: TemplateRenderer,
    networks: NetworkRegistry | None = None,
    shutdown: GracefulShutdown | None = None,
    metrics: ASGIApp | None = None,
    pages: Sequence[BaseRoute] = (),
) -> FastAPI:
    """Build the application; `metrics`, an object, is served at /metrics, `pages` at their paths.

    The caller closes `shutdown` before the server stops, `grammars` and `templates` afterwards.
    The application authorizes nothing: serve it behind `web/server.py`.
    """
    app = FastAPI(
        title="nesa-node",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.gateway = Gateway(
        models,
        networks or NetworkRegistry(()),
        config,
        shutdown or GracefulShutdown(),
        grammars,
        templates,
    )
    install_error_handlers(app)
    install_openapi(app)
    app.add_middleware(_HeadAsGet)
    app.add_middleware(ResponseMemory)
    for endpoint in _ENDPOINT_MODULES:
        app.include_router(endpoint.router)
    if metrics is not None:
        app.router.routes.append(Route("/metrics", metrics, include_in_schema=False))
    app.router.routes.append(gateway_info.docs_route(app.openapi))
    # No mount at "/": it would answer unknown paths, without OpenAI's error format.
    app.router.routes.extend(pages)
    return app


class _HeadAsGet:
    """Middleware that treats HEAD (of health checks) as GET; the server omits the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)
