"""Sessions of one process that want nodes, in the order in which they came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from nesa_node.core.errors import BusyError
from nesa_node.core.waiting import waiting

OPENING_AT_ONCE = 8
"""So many sessions of one process open, or ask busy nodes again, at the same time."""


class Line:
    """A few ask for all: nodes without room are not asked by everybody who waits.

    Nobody overtakes, so that nobody waits for ever. Used inside one event loop.
    """

    def __init__(self, at_once: int = OPENING_AT_ONCE) -> None:
        self._turns = asyncio.Semaphore(at_once)
        self._room = asyncio.Event()

    @asynccontextmanager
    async def turn(self, timeout_s: float) -> AsyncIterator[None]:
        """Wait for one's turn and have it. Raises `BusyError` if it does not come in time."""
        try:
            with waiting("other sessions of this process to open first", limit_s=timeout_s):
                async with asyncio.timeout(timeout_s):
                    await self._turns.acquire()
        except TimeoutError:
            raise BusyError(
                f"others of this process still wait for room after {timeout_s:g} s", 1.0
            ) from None
        try:
            yield
        finally:
            self._turns.release()

    def left(self) -> None:
        """A session of this process gave its places back: those whose turn it is ask at once."""
        self._room.set()

    async def pause(self, seconds: float) -> None:
        """Wait `seconds`, or until a session of this process gave its places back."""
        try:
            async with asyncio.timeout(seconds):
                await self._room.wait()
        except TimeoutError:
            pass
        self._room.clear()
