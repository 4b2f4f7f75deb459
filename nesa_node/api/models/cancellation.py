"""Cancellation of work when its client disconnects or when it cannot succeed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import Receive


class ClientDisconnected(Exception):
    """The client has disconnected."""


@asynccontextmanager
async def cancel_when(*watches: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run the body beside `watches`; if one raises, cancel the body and raise that error.

    A watch that returns has no effect. Leaving the body cancels the watches.
    """
    try:
        async with _run_beside(watches):
            yield
    except BaseExceptionGroup as errors:
        try:
            # The first error is the cause; later ones follow from the cancellation.
            raise errors.exceptions[0] from None
        finally:
            # Breaks the reference cycle of the two errors, which would keep the request alive.
            errors.exceptions[0].__context__ = errors.__traceback__ = None


@asynccontextmanager
async def _run_beside(watches: Sequence[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(watch) for watch in watches]
        try:
            yield
        finally:
            # The cancelled task's traceback keeps this frame: leave no references in it.
            while tasks:
                tasks.pop().cancel()
            del group


async def watch_disconnect(receive: Receive) -> None:
    """Raise `ClientDisconnected` once the client, whose body was read, disconnects."""
    while True:
        if (await receive())["type"] == "http.disconnect":
            raise ClientDisconnected
