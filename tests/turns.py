"""Whether other tasks get their turn while one reads what a peer floods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def turns_of_the_loop() -> AsyncIterator[list[int]]:
    """How many turns the event loop took, so far."""
    turns = [0]

    async def count() -> None:
        while True:
            await asyncio.sleep(0)
            turns[0] += 1

    counting = asyncio.create_task(count())
    try:
        yield turns
    finally:
        counting.cancel()
        await asyncio.gather(counting, return_exceptions=True)
