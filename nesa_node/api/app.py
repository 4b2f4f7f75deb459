"""ASGI application of the gateway: OpenAI's API for the models of a swarm."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from nesa_node import __version__
from nesa_node.api import (
    catalogue,
    chat,
    completions,
    embeddings,
    health,
    openapi,
    responses,
    tokens,
)
from nesa_node.api.answering import failures
from nesa_node.api.answering.answer_room import AnswerRoom
from nesa_node.api.answering.closing import Closing
from nesa_node.api.docs_page import docs_route
from nesa_node.api.gateway import Gateway
from nesa_node.api.serving.grammar_checker import GrammarChecker
from nesa_node.api.serving.models import Models
from nesa_node.api.serving.template_renderer import TemplateRenderer
from nesa_node.core.config import GatewayConfig

_ENDPOINTS = (chat, completions, embeddings, responses, catalogue, tokens, health)


def make_app(
    models: Models,
    config: GatewayConfig,
    *,
    grammars: GrammarChecker,
    templates: TemplateRenderer,
    closing: Closing | None = None,
    metrics: ASGIApp | None = None,
    pages: Sequence[BaseRoute] = (),
) -> FastAPI:
    """Build the application; `metrics` is served at /metrics, `pages` at their own paths.

    The caller closes `closing` before the server stops, `grammars` and `templates` afterwards.
    The application authorizes nothing: serve it behind `web/gate.py`.
    """
    app = FastAPI(
        title="nesa-node",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.gateway = Gateway(models, config, closing or Closing(), grammars, templates)
    failures.install(app)
    openapi.install(app)
    app.add_middleware(_Heads)
    app.add_middleware(AnswerRoom)
    for endpoint in _ENDPOINTS:
        app.include_router(endpoint.router)
    if metrics is not None:
        app.router.routes.append(Route("/metrics", _Whole(metrics), include_in_schema=False))
    app.router.routes.append(docs_route(app.openapi))
    # No mount at "/": it would answer unknown paths, without OpenAI's error format.
    app.router.routes.extend(pages)
    return app


class _Heads:
    """Middleware that treats HEAD (of health checks) as GET; the server omits the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class _Whole:
    """ASGI application as an endpoint: starlette takes a plain function for a request handler."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
