"""Limit on the sessions of one process that open at the same time, in order of arrival."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from nesa_node.core.errors import BusyError
from nesa_node.core.waiting import waiting

OPENING_AT_ONCE = 8
"""Most sessions that open, or retry busy nodes, at the same time."""


class Line:
    """Fair semaphore for opening sessions, so that busy nodes are not asked by all sessions at
    once.

    First come, first served. For one event loop.
    """

    def __init__(self, at_once: int = OPENING_AT_ONCE) -> None:
        self._turns = asyncio.Semaphore(at_once)
        self._room = asyncio.Event()

    @asynccontextmanager
    async def turn(self, timeout_s: float) -> AsyncIterator[None]:
        """Acquire a slot for the block. Raises `BusyError` after `timeout_s`."""
        try:
            with waiting("other sessions of this process to open first", limit_s=timeout_s):
                async with asyncio.timeout(timeout_s):
                    await self._turns.acquire()
        except TimeoutError:
            raise BusyError(
                f"other sessions of this process still open after {timeout_s:g} s", 1.0
            ) from None
        try:
            yield
        finally:
            self._turns.release()

    def left(self) -> None:
        """Wake sessions in `pause`: a session of this process released its cache."""
        self._room.set()

    async def pause(self, seconds: float) -> None:
        """Wait `seconds`, or until a session of this process releases its cache."""
        try:
            async with asyncio.timeout(seconds):
                await self._room.wait()
        except TimeoutError:
            pass
        self._room.clear()
