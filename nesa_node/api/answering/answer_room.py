"""How much memory answers take that their clients have not read."""

from __future__ import annotations

from contextlib import ExitStack
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

from nesa_node.web.doorman import current_caller
from nesa_node.web.shares import Shares

ROOM_KIB = 1 << 20
"""Of all large answers. Beside other keys, one key has a quarter."""
_RETRY_S = 5.0

_room = Shares(ROOM_KIB, "KiB of large answers", retry_after_s=_RETRY_S)
_taken: ContextVar[ExitStack] = ContextVar("taken")


def take_room(size: int) -> None:
    """Have room for an answer of so many bytes until it has been sent, or its client has gone.

    Its request has ended on the nodes long before, where a client does not read. Inside an
    `AnswerRoom`. Raises `Problem` as `Shares` do.
    """
    _taken.get().enter_context(_room.holding(current_caller(), -(-size // 1024)))


class AnswerRoom:
    """Gives back what a request's answer took, once its response has been sent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as taken:
            token = _taken.set(taken)
            try:
                await self._app(scope, receive, send)
            finally:
                _taken.reset(token)
