"""Memory limit of responses that clients have not read yet."""

from __future__ import annotations

from contextlib import ExitStack
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

from nesa_node.web.doorman import current_caller
from nesa_node.web.shares import Shares

ROOM_KIB = 1 << 20
"""Memory of all large responses; a key may use a quarter of it while other keys use some."""
_RETRY_S = 5.0

_room = Shares(ROOM_KIB, "KiB of large answers", retry_after_s=_RETRY_S)
_taken: ContextVar[ExitStack] = ContextVar("taken")


def take_room(size: int) -> None:
    """Reserve `size` bytes until the response has been sent or its client has disconnected.

    A response that its client reads slowly outlives the request on the nodes. Call it within
    `AnswerRoom`. Raises `Problem` as `Shares` does.
    """
    _taken.get().enter_context(_room.holding(current_caller(), -(-size // 1024)))


class AnswerRoom:
    """Middleware that releases a request's reservations once its response has been sent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as taken:
            token = _taken.set(taken)
            try:
                await self._app(scope, receive, send)
            finally:
                _taken.reset(token)
