"""Telemetry of HTTP requests: response counts, log events and trace spans."""

from __future__ import annotations

import time
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from nesa_node.api.models.metrics import GatewayMetrics
from nesa_node.api.responses.http_responses import collect_error_codes
from nesa_node.core import tracing
from nesa_node.core.logging import get_logger
from nesa_node.core.tracing import NO_SPAN, TraceContext, TraceSpan

log = get_logger(__name__)

USAGE_STATE_KEY = "asked"
"""Key of a request's `UsageCounter` in its state."""
CLIENT_CLOSED_STATUS = 499
"""Status counted for a client that disconnected before the response began; nginx's code."""


class RequestTelemetry:
    """Outermost middleware but for the one that assigns request ids.

    Counts all responses. Logs `request_answered`, with the key's name, the model and its tokens,
    for POST requests and paths below /v1. Starts a trace span for POST requests, the parent of
    their sessions' spans. Binds `request_id` to all log events of the request.
    """

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, routes: Iterable[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = frozenset(routes)
        metrics.add_routes(*self._routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, started_s = CLIENT_CLOSED_STATUS, time.perf_counter()

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        request_id, span = scope.get("state", {}).get("request_id", ""), self._start_span(scope)
        with (
            bound_contextvars(request_id=request_id),
            tracing.use_span(span),
            collect_error_codes() as codes,
        ):
            try:
                await self._app(scope, receive, sent)
            except Exception:
                status = 500 if status == CLIENT_CLOSED_STATUS else status
                raise
            finally:
                route = self._route_template(scope)
                self._metrics.count_response(route, status)
                span.set_attributes(
                    {"http.response.status_code": status, "nesa.request_id": request_id}
                )
                if scope["method"] == "POST" or (route or "").startswith("/v1/"):
                    ms = round((time.perf_counter() - started_s) * 1000, 1)
                    fields = _request_fields(scope) | ({"error": codes[-1]} if codes else {})
                    log.info("request_answered", route=route, status=status, ms=ms, **fields)

    def _start_span(self, scope: Scope) -> TraceSpan:
        path, method = scope["path"], scope["method"]
        if method != "POST" or path not in self._routes:
            return NO_SPAN
        parent = TraceContext.parse_header(Headers(scope=scope).get("traceparent", ""))
        attributes = {"http.request.method": method, "http.route": path}
        return tracing.start_span(f"{method} {path}", parent, attributes)

    def _route_template(self, scope: Scope) -> str | None:
        """Path template of the matching route; None if no known route matches."""
        if scope["path"] in self._routes:
            return str(scope["path"])
        template = getattr(scope.get("route"), "path_format", None)
        return template if template in self._routes else None


def _request_fields(scope: Scope) -> dict[str, object]:
    """Log fields of a request: key name, model and tokens, as far as they are known.

    Names of keys are not secret. Usage is removed from the state, which lives until the next
    request of the connection.
    """
    state = scope.get("state", {})
    found: dict[str, object] = {}
    if (caller := state.get("caller")) is not None:
        found["key"] = caller.name
    if (usage := state.pop(USAGE_STATE_KEY, None)) is not None:
        found |= {
            "model": usage.model,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.new_tokens,
        }
    return found
