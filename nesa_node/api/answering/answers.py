"""HTTP responses that are computed while the client waits: JSON, or server-sent events.

When the client disconnects, the computation is cancelled at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from itertools import chain
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from nesa_node.api.answering.closing import Closing
from nesa_node.api.answering.failures import is_failure, problem_of
from nesa_node.api.serving.unless import ClientGone, gone, unless
from nesa_node.core.waiting import Waits
from nesa_node.web.problem import Problem

DONE = b"data: [DONE]\n\n"
SEND_S = 60.0
"""Time limit of one write, after which a client that reads nothing is disconnected."""

CHUNK_BYTES = 1 << 16
"""Size at which a part of a JSON response is sent, while the rest is not encoded yet."""

_encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode
_JSON = "application/json"
_COMMENT = b": waiting\n\n"
_LOOK_EVERY_S = 0.25
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    # Keeps nginx from buffering events.
    (b"x-accel-buffering", b"no"),
]


def event(data: Mapping[str, Any]) -> bytes:
    """Server-sent event with `data` as JSON."""
    return b"data: " + _encode(data) + b"\n\n"


def named_event(data: Mapping[str, Any]) -> bytes:
    """Server-sent event with `data` as JSON, named by its `type`."""
    name: str = data["type"]
    return b"event: " + name.encode() + b"\n" + event(data)


def json_response(value: Any, status: int = 200) -> Response:
    return Response(_encode(value), status, media_type=_JSON)


def whole_response(value: Mapping[str, Any]) -> Response:
    """Response with `value` as JSON, in which iterators are encoded as lists.

    A large value is encoded in parts while it is sent: many megabytes neither block the event loop
    nor are encoded for a client that does not read them.
    """
    chunks = _chunks(value)
    first, second = next(chunks), next(chunks, None)
    if second is None:
        return Response(first, media_type=_JSON)
    return StreamingResponse(_in_turns(chain((first, second), chunks)), media_type=_JSON)


def _chunks(value: Mapping[str, Any]) -> Iterator[bytes]:
    chunk = bytearray()
    for part in _parts(value):
        chunk += part
        if len(chunk) >= CHUNK_BYTES:
            yield bytes(chunk)
            chunk.clear()
    if chunk:
        yield bytes(chunk)


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, Mapping):
        for number, (key, item) in enumerate(value.items()):
            yield (b"," if number else b"{") + _encode(key) + b":"
            yield from _parts(item)
        yield b"}" if value else b"{}"
    elif isinstance(value, list | Iterator):
        yield b"["
        for number, item in enumerate(value):
            if number:
                yield b","
            yield from _parts(item)
        yield b"]"
    else:
        yield _encode(value)


async def _in_turns(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk
        # Sending to a fast client never yields to the event loop by itself.
        await asyncio.sleep(0)


class Computed(Response):
    """Response with the JSON that `work` returns (`whole_response`), or with its error."""

    def __init__(self, work: Callable[[], Awaitable[Mapping[str, Any]]], closing: Closing) -> None:
        super().__init__()
        self._work = work
        self._closing = closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # Waits show only on the dashboard: a JSON response cannot report them before its end.
            with self._closing.answering(), Waits().current():
                async with unless(gone(receive), self._closing.watch()):
                    response = whole_response(await self._work())
        except ClientGone:
            return
        except BaseException as error:  # any failure becomes an error response
            if not is_failure(error):
                raise
            response = problem_of(error).response()
        await response(scope, receive, send)


class EventStream(Response):
    """Server-sent events that `make` yields, sent as they come.

    The response begins with the first event, so that an earlier failure is an HTTP error. After
    two seconds without an event, or `keepalive_s`, it begins with status 200 and a comment that
    names the cause of the wait; further comments follow until the next event. A later failure is
    sent as the last event, encoded by `failed`.
    """

    def __init__(
        self,
        make: Callable[[], AsyncGenerator[bytes, None]],
        closing: Closing,
        *,
        keepalive_s: float,
        failed: Callable[[Problem], bytes] | None = None,
    ) -> None:
        super().__init__()
        self._make = make
        self._closing = closing
        self._keepalive_s = keepalive_s
        self._failed = failed or as_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wire, waits = _Wire(send), Waits()
        try:
            async with unless(gone(receive), wire.keep_alive(self._keepalive_s, waits)):
                with waits.current():
                    await self._send_events(scope, receive, wire)
        except ClientGone:
            return

    async def _send_events(self, scope: Scope, receive: Receive, wire: _Wire) -> None:
        try:
            with self._closing.answering():
                async with unless(self._closing.watch()), aclosing(self._make()) as events:
                    async for data in events:
                        await wire.write(data)
        except ClientGone:
            raise
        except BaseException as error:  # any failure becomes an error response or event
            if not is_failure(error):
                raise
            problem = problem_of(error)
            if await wire.instead(problem.response(), scope, receive):
                return
            await wire.write(self._failed(problem))
        await wire.end()


class _Wire:
    """Body of a streamed response, written by the event stream and by the keep-alive task."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = False
        self._ended = False
        self._last = time.monotonic()
        self._writing = asyncio.Lock()

    async def write(self, data: bytes) -> None:
        """Send `data` unless the body has ended. Raises `ClientGone` after `SEND_S`."""
        try:
            async with asyncio.timeout(SEND_S), self._writing:
                if self._ended:
                    return
                if not self._started:
                    self._started = True
                    await self._send(
                        {"type": "http.response.start", "status": 200, "headers": [*_HEADERS]}
                    )
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError:
            raise ClientGone from None
        self._last = time.monotonic()

    async def end(self) -> None:
        async with self._writing:
            self._ended = True
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def instead(self, response: Response, scope: Scope, receive: Receive) -> bool:
        """Send `response` in place of this one; False if this one has begun."""
        async with self._writing:
            if not self._started:
                self._ended = True
                await response(scope, receive, self._send)
            return not self._started

    async def keep_alive(self, every_s: float, waits: Waits) -> None:
        """Send comments: the cause of the wait when it changes, else a keep-alive."""
        told: object = None
        while True:
            wait = waits.slow()
            now = time.monotonic()
            if wait is not None and (wait.subject != told or now - self._last >= every_s):
                told = wait.subject
                await self.write(b": " + wait.text(waits.clock()).encode() + b"\n\n")
            elif now - self._last >= every_s:
                await self.write(_COMMENT)
            await asyncio.sleep(min(every_s, _LOOK_EVERY_S))


def as_error(problem: Problem) -> bytes:
    """Last events of a stream that failed: OpenAI's error and [DONE]."""
    return event(problem.body()) + DONE
