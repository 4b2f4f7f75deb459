"""Graceful shutdown: responses may finish within a grace period, then end with an error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from nesa_node.web.problem import Problem

_LAST_WORDS_S = 0.5
"""Time for the final error events of streams that the shutdown ends."""


class Closing:
    """Tracker of responses that are being computed. Used on one event loop."""

    def __init__(self) -> None:
        self._running = 0
        self._asked = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._over = asyncio.Event()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Context of one response. Raises `Problem` once the shutdown has begun."""
        if self._asked:
            raise _stopping()
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def watch(self) -> None:
        """Wait for the end of the grace period, then raise `Problem`."""
        await self._over.wait()
        raise _stopping()

    async def close(self, grace_s: float) -> None:
        """Refuse new responses, wait up to `grace_s` for running ones, then end them."""
        self._asked = True
        await self._wait_idle(grace_s)
        self._over.set()
        await self._wait_idle(_LAST_WORDS_S)

    async def _wait_idle(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()


def _stopping() -> Problem:
    return Problem(
        503, "the gateway is being stopped: ask again", code="shutting_down", retry_after_s=5
    )
