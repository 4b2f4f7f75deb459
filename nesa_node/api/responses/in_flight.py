"""Memory limit of responses that clients have not read yet, and graceful shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

from nesa_node.web.authenticator import current_caller
from nesa_node.web.problem import HttpProblem
from nesa_node.web.rate_limits import FairSlots

MAX_RESPONSES_KIB = 1 << 20
"""Memory of all large responses; a key may use a quarter of it while other keys use some."""
_MEMORY_RETRY_S = 5.0

_memory_shares = FairSlots(MAX_RESPONSES_KIB, "KiB of large answers", retry_after_s=_MEMORY_RETRY_S)
_reserved: ContextVar[ExitStack] = ContextVar("taken")


def reserve_memory(size: int) -> None:
    """Reserve `size` bytes until the response has been sent or its client has disconnected.

    A response that its client reads slowly outlives the request on the nodes. Call it within
    `ResponseMemory`. Raises `HttpProblem` as `FairSlots` does.
    """
    _reserved.get().enter_context(_memory_shares.hold(current_caller(), -(-size // 1024)))


class ResponseMemory:
    """Middleware that releases a request's reservations once its response has been sent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as taken:
            token = _reserved.set(taken)
            try:
                await self._app(scope, receive, send)
            finally:
                _reserved.reset(token)


_FINAL_EVENTS_S = 0.5
"""Time for the final error events of streams that the shutdown ends."""


class GracefulShutdown:
    """Tracker of responses that are being computed. Used on one event loop.

    Responses may finish within a grace period, then end with an error.
    """

    def __init__(self) -> None:
        self._running = 0
        self._is_closing = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._grace_over = asyncio.Event()

    @contextmanager
    def track_response(self) -> Iterator[None]:
        """Context of one response. Raises `HttpProblem` once the shutdown has begun."""
        if self._is_closing:
            raise _shutdown_problem()
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def wait_for_end(self) -> None:
        """Wait for the end of the grace period, then raise `HttpProblem`."""
        await self._grace_over.wait()
        raise _shutdown_problem()

    async def close(self, grace_s: float) -> None:
        """Refuse new responses, wait up to `grace_s` for running ones, then end them."""
        self._is_closing = True
        await self._wait_idle(grace_s)
        self._grace_over.set()
        await self._wait_idle(_FINAL_EVENTS_S)

    async def _wait_idle(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()


def _shutdown_problem() -> HttpProblem:
    return HttpProblem(
        503, "the gateway is being stopped: ask again", code="shutting_down", retry_after_s=5
    )
