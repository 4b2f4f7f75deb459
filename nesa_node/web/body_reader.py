"""Request bodies, read whole before the application runs, in bounded time and memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope

from nesa_node.web.problem import HttpProblem

READ_TIMEOUT_S = 60.0
MAX_HELD_BODIES = 16
"""Maximum size of all held bodies, in bodies of the maximum size."""
CALLER_SHARE_DIVISOR = 4
_OVERLOAD_RETRY_S = 2.0


class BodyReader:
    """Reads bodies of at most `max_bytes`, each within `read_timeout_s` seconds (`READ_TIMEOUT_S`).

    All held bodies have at most `max_held_bodies` times `max_bytes`; those of one
    caller a quarter of that, or more while all bodies together stay below half.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        read_timeout_s: float | None = None,
        max_held_bodies: int | None = None,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_held_bytes = max_bytes * (
            MAX_HELD_BODIES if max_held_bodies is None else max_held_bodies
        )
        self._read_timeout_s = READ_TIMEOUT_S if read_timeout_s is None else read_timeout_s
        self._held_bytes = 0
        self._held_bytes_of: Counter[str] = Counter()

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    @asynccontextmanager
    async def read_whole(
        self, scope: Scope, receive: Receive, *, caller: str | None = None
    ) -> AsyncIterator[Receive]:
        """Read the body; yields a receiver that gives it as one message, then later messages.

        Raises `HttpProblem` 413, 408, 429 or 503, and `ClientDisconnect`. The body counts as held
        until the context ends. Without a `caller` only the limit of all bodies applies.
        """
        headers = Headers(scope=scope)
        length = headers.get("content-length")
        if length is None and "transfer-encoding" not in headers:
            yield receive
            return
        if length is not None and int(length) > self._max_bytes:
            raise self._too_large()
        body = await self._read_bounded(receive, caller)
        try:
            yield _replay_body(body, receive)
        finally:
            self._release_bytes(len(body), caller)

    async def _read_bounded(self, receive: Receive, caller: str | None) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(self._read_timeout_s):
                await self._read(body, receive, caller)
        except BaseException as error:
            self._release_bytes(len(body), caller)
            if not isinstance(error, TimeoutError):
                raise
            raise HttpProblem(
                408,
                f"the request did not arrive within {self._read_timeout_s:g} s",
                code="request_timeout",
            ) from None
        return bytes(body)

    async def _read(self, body: bytearray, receive: Receive, caller: str | None) -> None:
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientDisconnect
            chunk = message.get("body", b"")
            if len(body) + len(chunk) > self._max_bytes:
                raise self._too_large()
            self._reserve_bytes(len(chunk), caller)
            body += chunk
            if not message.get("more_body", False):
                return

    def _reserve_bytes(self, size: int, caller: str | None) -> None:
        if self._held_bytes + size > self._max_held_bytes:
            raise HttpProblem(
                503,
                "too many large requests at once: try again",
                code="overloaded",
                retry_after_s=_OVERLOAD_RETRY_S,
            )
        if caller is not None:
            # Otherwise one key with answers that take minutes could block all other keys.
            is_large = (
                self._held_bytes_of[caller] + size > self._max_held_bytes // CALLER_SHARE_DIVISOR
            )
            if is_large and self._held_bytes + size > self._max_held_bytes // 2:
                raise HttpProblem(
                    429,
                    "too many large requests of this key at once: wait until one of them ends",
                    code="rate_limit_exceeded",
                    retry_after_s=_OVERLOAD_RETRY_S,
                )
            self._held_bytes_of[caller] += size
        self._held_bytes += size

    def _release_bytes(self, size: int, caller: str | None) -> None:
        self._held_bytes -= size
        if caller is not None:
            self._held_bytes_of[caller] -= size
            self._held_bytes_of += Counter()

    def _too_large(self) -> HttpProblem:
        return HttpProblem(
            413, f"a request may have {self._max_bytes} bytes", code="request_too_large"
        )


def _replay_body(body: bytes, receive: Receive) -> Receive:
    given = False

    async def first_the_body() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return first_the_body
