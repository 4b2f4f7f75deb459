"""Room for values is granted in turn, and given back whatever becomes of the waiting call."""

from __future__ import annotations

import asyncio

from nesa_node.core.ids import PeerId
from nesa_node.server.graphs.request_room import RequestRoom

A, B = PeerId("a"), PeerId("b")


async def settle(*tasks: asyncio.Task[None]) -> list[bool]:
    for _ in range(5):
        await asyncio.sleep(0)
    return [task.done() for task in tasks]


async def test_first_in_first_out_for_each_peer() -> None:
    room = RequestRoom(8)
    await room.acquire(A, 3)
    large = asyncio.create_task(room.acquire(A, 4))
    small = asyncio.create_task(room.acquire(A, 1))
    other = asyncio.create_task(room.acquire(B, 4))
    assert await settle(large, small, other) == [False, False, True]
    room.release(A, 3)
    assert await settle(large, small) == [True, False]
    room.release(A, 4)
    assert await settle(small) == [True]
    room.release(A, 1)
    room.release(B, 4)
    assert room.held_bytes == 0


async def test_calls_that_are_cancelled_hold_nothing() -> None:
    room = RequestRoom(8)
    await room.acquire(A, 4)
    waiting = asyncio.create_task(room.acquire(A, 4))
    behind = asyncio.create_task(room.acquire(A, 2))
    await settle()
    waiting.cancel()
    assert await settle(waiting, behind) == [True, False]
    room.release(A, 4)
    behind.cancel()  # it has been granted, and has not run yet
    await asyncio.wait({behind})
    assert behind.cancelled()
    assert room.held_bytes == 0
