"""HTTP responses that are computed while the client waits, and errors of all responses.

When the client disconnects, the computation is cancelled at once.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nesa_node.api.models.jobs import ClientDisconnected, cancel_when, watch_disconnect
from nesa_node.api.responses.in_flight import GracefulShutdown
from nesa_node.core.errors import (
    AdapterError,
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
    WrongActivationsError,
)
from nesa_node.core.logging import get_logger
from nesa_node.core.wait_tracking import WaitTracker
from nesa_node.web.problem import HttpProblem

log = get_logger(__name__)

_ERROR_TABLE: tuple[tuple[type[NesaError], int, str, float | None], ...] = (
    (ContextLengthError, 400, "context_length_exceeded", None),
    (UnsupportedFeatureError, 400, "unsupported_parameter", None),
    (MissingBlocksError, 503, "missing_blocks", 10),
    (WrongActivationsError, 502, "wrong_activations", 0),
    (BusyError, 503, "busy", 5),
    (RefusedError, 502, "refused", None),
    (ProtocolError, 502, "broken_chain", 2),
    (CacheFullError, 503, "cache_full", 5),
    (ResourceError, 503, "out_of_resources", 30),
    (AdapterError, 404, "model_not_found", None),
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
    if not isinstance(error, HTTPException) or error.status_code not in (404, 405):
        return to_problem(error).response()
    path = request.url.path
    asked = f"{request.method} {path[:200]}"
    code, reason = "method_not_allowed", f"this page has no such method: {asked}"
    if error.status_code == 404:
        hint = "" if path.startswith("/v1/") else " (OpenAI's paths begin with /v1)"
        code, reason = "unknown_url", f"there is no such page: {asked}{hint}"
    response = HttpProblem(error.status_code, reason, code=code).response()
    response.headers.update(error.headers or {})
    return response


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


DONE_EVENT = b"data: [DONE]\n\n"
SEND_TIMEOUT_S = 60.0
"""Time limit of one write, after which a client that reads nothing is disconnected."""

MAX_CHUNK_BYTES = 1 << 16
"""Size at which a part of a JSON response is sent, while the rest is not encoded yet."""

_encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode
_JSON = "application/json"
_KEEPALIVE_COMMENT = b": waiting\n\n"
_KEEPALIVE_POLL_S = 0.25
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    # Keeps nginx from buffering events.
    (b"x-accel-buffering", b"no"),
]


def sse_event(data: Mapping[str, Any]) -> bytes:
    """Server-sent event with `data` as JSON."""
    return b"data: " + _encode(data) + b"\n\n"


def named_sse_event(data: Mapping[str, Any]) -> bytes:
    """Server-sent event with `data` as JSON, named by its `type`."""
    name: str = data["type"]
    return b"event: " + name.encode() + b"\n" + sse_event(data)


def json_response(value: Any) -> Response:
    return Response(_encode(value), media_type=_JSON)


def chunked_json_response(value: Mapping[str, Any]) -> Response:
    """Response with `value` as JSON, in which iterators are encoded as lists.

    A large value is encoded in parts while it is sent: many megabytes neither block the event loop
    nor are encoded for a client that does not read them.
    """
    chunks = _encode_chunks(value)
    first, second = next(chunks), next(chunks, None)
    if second is None:
        return Response(first, media_type=_JSON)
    return StreamingResponse(_yield_to_loop(chain((first, second), chunks)), media_type=_JSON)


def _encode_chunks(value: Mapping[str, Any]) -> Iterator[bytes]:
    chunk = bytearray()
    for part in _encode_parts(value):
        chunk += part
        if len(chunk) >= MAX_CHUNK_BYTES:
            yield bytes(chunk)
            chunk.clear()
    if chunk:
        yield bytes(chunk)


def _encode_parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, Mapping):
        for number, (key, item) in enumerate(value.items()):
            yield (b"," if number else b"{") + _encode(key) + b":"
            yield from _encode_parts(item)
        yield b"}" if value else b"{}"
    elif isinstance(value, list | Iterator):
        yield b"["
        for number, item in enumerate(value):
            if number:
                yield b","
            yield from _encode_parts(item)
        yield b"]"
    else:
        yield _encode(value)


async def _yield_to_loop(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk
        # Sending to a fast client never yields to the event loop by itself.
        await asyncio.sleep(0)


class ComputedResponse(Response):
    """Response with the JSON (`chunked_json_response`) or text that `work` returns, or its error.

    `headers` returns headers of that, once it is there.
    """

    def __init__(
        self,
        work: Callable[[], Awaitable[Mapping[str, Any] | str]],
        shutdown: GracefulShutdown,
        *,
        headers: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        super().__init__()
        self._work = work
        self._shutdown = shutdown
        self._more_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # Waits show only on the dashboard: a JSON response cannot report them before its end.
            with self._shutdown.track_response(), WaitTracker().activate():
                async with cancel_when(watch_disconnect(receive), self._shutdown.wait_for_end()):
                    made = await self._work()
                    response = (
                        PlainTextResponse(made)
                        if isinstance(made, str)
                        else chunked_json_response(made)
                    )
                    response.headers.update(self._more_headers())
        except ClientDisconnected:
            return
        except BaseException as error:  # any failure becomes an error response
            if not is_reportable(error):
                raise
            response = to_problem(error).response()
        await response(scope, receive, send)


class SseResponse(Response):
    """Server-sent events that `make` yields, sent as they come.

    The response begins with the first event, so that an earlier failure is an HTTP error. After
    two seconds without an event, or `keepalive_s`, it begins with status 200 and a comment that
    names the cause of the wait; further comments follow until the next event. A later failure is
    sent as the last event, encoded by `error_event`.
    """

    def __init__(
        self,
        make: Callable[[], AsyncGenerator[bytes, None]],
        shutdown: GracefulShutdown,
        *,
        keepalive_s: float,
        error_event: Callable[[HttpProblem], bytes],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._sse_headers = [*_SSE_HEADERS]
        self._sse_headers += [(k.encode(), v.encode()) for k, v in (headers or {}).items()]
        self._make = make
        self._shutdown = shutdown
        self._keepalive_s = keepalive_s
        self._error_event = error_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wire, waits = _SseWriter(send, self._sse_headers), WaitTracker()
        try:
            async with cancel_when(
                watch_disconnect(receive), wire.keep_alive(self._keepalive_s, waits)
            ):
                with waits.activate():
                    await self._send_events(scope, receive, wire)
        except ClientDisconnected:
            return

    async def _send_events(self, scope: Scope, receive: Receive, wire: _SseWriter) -> None:
        try:
            with self._shutdown.track_response():
                async with (
                    cancel_when(self._shutdown.wait_for_end()),
                    aclosing(self._make()) as events,
                ):
                    async for data in events:
                        await wire.write(data)
        except ClientDisconnected:
            raise
        except BaseException as error:  # any failure becomes an error response or event
            if not is_reportable(error):
                raise
            problem = to_problem(error)
            if await wire.replace_with(problem.response(), scope, receive):
                return
            await wire.write(self._error_event(problem))
        await wire.end()


class _SseWriter:
    """Body of a streamed response, written by the event stream and by the keep-alive task."""

    def __init__(self, send: Send, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers
        self._started = False
        self._ended = False
        self._last_write_s = time.monotonic()
        self._write_lock = asyncio.Lock()

    async def write(self, data: bytes) -> None:
        """Send `data` unless the body has ended. `ClientDisconnected` after `SEND_TIMEOUT_S`."""
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S), self._write_lock:
                if self._ended:
                    return
                if not self._started:
                    self._started = True
                    await self._send(
                        {"type": "http.response.start", "status": 200, "headers": [*self._headers]}
                    )
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError:
            raise ClientDisconnected from None
        self._last_write_s = time.monotonic()

    async def end(self) -> None:
        async with self._write_lock:
            self._ended = True
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def replace_with(self, response: Response, scope: Scope, receive: Receive) -> bool:
        """Send `response` in place of this one; False if this one has begun."""
        async with self._write_lock:
            if not self._started:
                self._ended = True
                await response(scope, receive, self._send)
            return not self._started

    async def keep_alive(self, every_s: float, waits: WaitTracker) -> None:
        """Send comments: the cause of the wait when it changes, else a keep-alive."""
        last_cause: object = None
        while True:
            wait = waits.slow_wait()
            now = time.monotonic()
            if wait is not None and (wait.key != last_cause or now - self._last_write_s >= every_s):
                last_cause = wait.key
                await self.write(b": " + wait.text(waits.clock()).encode() + b"\n\n")
            elif now - self._last_write_s >= every_s:
                await self.write(_KEEPALIVE_COMMENT)
            await asyncio.sleep(min(every_s, _KEEPALIVE_POLL_S))


def error_events(problem: HttpProblem) -> bytes:
    """Last events of a stream that failed: OpenAI's error and [DONE]."""
    return sse_event(problem.body()) + DONE_EVENT


def new_id(kind: str) -> str:
    """Unguessable id that begins with `kind`: `chatcmpl-…`, with 128 random bits."""
    return kind + secrets.token_hex(16)
