"""Work that ends early: when its client has gone, or when it is known that it cannot succeed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import Receive


class ClientGone(Exception):
    """Nobody is left to answer."""


@asynccontextmanager
async def unless(*watches: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """The body, unless one of `watches` raises first: then it is cancelled, and that is raised.

    A watch that returns has no more to say.
    """
    try:
        async with _beside(watches):
            yield
    except BaseExceptionGroup as errors:
        try:
            # The first is the cause: the others come of what it has cancelled.
            raise errors.exceptions[0] from None
        finally:
            # Else each would keep the other, and what was being done, until Python collects cycles.
            errors.exceptions[0].__context__ = errors.__traceback__ = None


@asynccontextmanager
async def _beside(watches: Sequence[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(watch) for watch in watches]
        try:
            yield
        finally:
            # What is left in this frame stays with the traceback of whoever is cancelled.
            while tasks:
                tasks.pop().cancel()
            del group


async def gone(receive: Receive) -> None:
    """Raises `ClientGone` once the client has closed the connection. Its body was read before."""
    while True:
        if (await receive())["type"] == "http.disconnect":
            raise ClientGone
