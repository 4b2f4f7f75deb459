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
from nesa_node.web.problem import Problem

log = get_logger(__name__)

_TABLE: tuple[tuple[type[NesaError], int, str, float | None], ...] = (
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

_told: ContextVar[list[str]] = ContextVar("told")


@contextmanager
def noting_failures() -> Iterator[list[str]]:
    """Collect the codes of errors sent to the client in this context, also within a stream."""
    codes: list[str] = []
    token = _told.set(codes)
    try:
        yield codes
    finally:
        _told.reset(token)


def is_failure(error: BaseException) -> bool:
    """Whether the client gets an error: a Rust panic (tokenizers, llguidance) is no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def problem_of(error: BaseException) -> Problem:
    """`Problem` for the client. Unexpected errors are logged, and their text is not sent."""
    problem = _problem_of(error)
    _told.get([]).append(problem.code or str(problem.status))
    return problem


def _problem_of(error: BaseException) -> Problem:
    if isinstance(error, Problem):
        return error
    if isinstance(error, HTTPException):
        return Problem(error.status_code, str(error.detail))
    if isinstance(error, NesaError):
        for kind, status, code, retry_after_s in _TABLE:
            if isinstance(error, kind):
                later = error.retry_after_s if isinstance(error, BusyError) else retry_after_s
                return Problem(status, str(error), code=code, retry_after_s=later)
    log.error("request_failed", reason=repr(error), exc_info=error)
    return Problem(500, "the gateway failed; its log says why", code="internal_error")


def install(app: FastAPI) -> None:
    """Have `app` send all errors in OpenAI's format, those of its own routing included."""
    for kind in (Problem, NesaError, HTTPException):
        app.add_exception_handler(kind, _answer)
    app.add_middleware(_Unexpected)


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        response = _nowhere(error.status_code, request.method, request.url.path).response()
        response.headers.update(error.headers or {})
        return response
    return problem_of(error).response()


def _nowhere(status: int, method: str, path: str) -> Problem:
    asked = f"{method} {path[:200]}"
    if status == 405:
        return Problem(405, f"this page has no such method: {asked}", code="method_not_allowed")
    hint = "" if path.startswith("/v1/") else " (OpenAI's paths begin with /v1)"
    return Problem(404, f"there is no such page: {asked}{hint}", code="unknown_url")


class _Unexpected:
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
            if started or not is_failure(error):
                # The response has begun: the server closes the connection.
                raise
            await problem_of(error).response()(scope, receive, send)
