"""HTTP errors: status and code of each class of `NesaError`, and exception handlers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nesa_node.core.errors import (
    BusyError,
    CacheFullError,
    ConfigError,
    ContextLengthError,
    MissingBlocksError,
    ModelError,
    NesaError,
    ProtocolError,
    RefusedError,
    ResourceError,
    SwarmError,
    UnsupportedFeatureError,
)
from nesa_node.core.logging import get_logger
from nesa_node.web.problem import HttpProblem

log = get_logger(__name__)

_ERROR_TABLE: tuple[tuple[type[NesaError], int, str, float | None], ...] = (
    (ContextLengthError, 400, "context_length_exceeded", None),
    (UnsupportedFeatureError, 400, "unsupported_parameter", None),
    (MissingBlocksError, 503, "missing_blocks", 10),
    (BusyError, 503, "busy", 5),
    (RefusedError, 502, "refused", None),
    (ProtocolError, 502, "broken_chain", 2),
    (CacheFullError, 503, "cache_full", 5),
    (ResourceError, 503, "out_of_resources", 30),
    (ModelError, 503, "model_unavailable", 60),
    (SwarmError, 503, "swarm_unreachable", 5),
    (ConfigError, 500, "misconfigured", None),
)
"""Class, HTTP status, `code`, and `retry-after` in seconds; the first matching class counts."""

_error_codes: ContextVar[list[str]] = ContextVar("told")


@contextmanager
def collect_error_codes() -> Iterator[list[str]]:
    """Collect the codes of errors sent to the client in this context, also within a stream."""
    codes: list[str] = []
    token = _error_codes.set(codes)
    try:
        yield codes
    finally:
        _error_codes.reset(token)


def is_reportable(error: BaseException) -> bool:
    """Whether the client gets an error: a Rust panic (tokenizers, llguidance) is no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def to_problem(error: BaseException) -> HttpProblem:
    """`HttpProblem` for the client. Unexpected errors are logged, and their text is not sent."""
    problem = _convert_error(error)
    _error_codes.get([]).append(problem.code or str(problem.status))
    return problem


def _convert_error(error: BaseException) -> HttpProblem:
    if isinstance(error, HttpProblem):
        return error
    if isinstance(error, HTTPException):
        return HttpProblem(error.status_code, str(error.detail))
    if isinstance(error, NesaError):
        for kind, status, code, retry_after_s in _ERROR_TABLE:
            if isinstance(error, kind):
                later = error.retry_after_s if isinstance(error, BusyError) else retry_after_s
                return HttpProblem(status, str(error), code=code, retry_after_s=later)
    log.error("request_failed", reason=repr(error), exc_info=error)
    return HttpProblem(500, "the gateway failed; its log says why", code="internal_error")


def install_error_handlers(app: FastAPI) -> None:
    """Have `app` send all errors in OpenAI's format, those of its own routing included."""
    for kind in (HttpProblem, NesaError, HTTPException):
        app.add_exception_handler(kind, _handle_error)
    app.add_middleware(_UnexpectedErrors)


async def _handle_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        response = _unknown_url_problem(
            error.status_code, request.method, request.url.path
        ).response()
        response.headers.update(error.headers or {})
        return response
    return to_problem(error).response()


def _unknown_url_problem(status: int, method: str, path: str) -> HttpProblem:
    asked = f"{method} {path[:200]}"
    if status == 405:
        return HttpProblem(405, f"this page has no such method: {asked}", code="method_not_allowed")
    hint = "" if path.startswith("/v1/") else " (OpenAI's paths begin with /v1)"
    return HttpProblem(404, f"there is no such page: {asked}{hint}", code="unknown_url")


class _UnexpectedErrors:
    """Middleware that answers unexpected errors, unless the response has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def sent(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, sent)
        except ClientDisconnect:
            return
        except BaseException as error:  # any failure is sent in OpenAI's format
            if started or not is_reportable(error):
                # The response has begun: the server closes the connection.
                raise
            await to_problem(error).response()(scope, receive, send)
