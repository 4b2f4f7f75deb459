"""What nodes that stand ready for others are taken to hold."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import AsyncMock

import pytest

from nesa_node.client.recovery import successors as successors_module
from nesa_node.client.recovery.successors import SuccessorPool
from nesa_node.core.errors import MissingBlocksError, PeerUnreachableError
from nesa_node.core.ids import PeerId, Span
from nesa_node.routing.chains import Hop


class ScriptedLink:
    """Its node hands six tokens over, when it is let."""

    def __init__(self, name: str) -> None:
        self.hop = Hop(PeerId(name), Span(0, 2))
        self.is_lost = False
        self.asked = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.fails = False

    async def hand_over(self, _to: object) -> tuple[int, ...]:
        self.asked.set()
        await self.goes_on.wait()
        if self.fails:
            raise PeerUnreachableError("its stream to the successor broke")
        return (6,)


async def held_by_successor(rolled_back_to: int | None) -> tuple[int, ...]:
    """What it is taken to hold where the session was rolled back while it was handed the cache."""
    leaving: Any = ScriptedLink("leaving")
    ready: Any = ScriptedLink("ready")
    successors = SuccessorPool(rows=1)
    successors.prepare(leaving, AsyncMock(return_value=ready))
    await leaving.asked.wait()
    if rolled_back_to is not None:
        successors.truncate([rolled_back_to])
    leaving.goes_on.set()
    while successors.prepare(leaving, AsyncMock(return_value=ready)):  # noqa: ASYNC110
        await asyncio.sleep(0)
    # It is asked for nothing more.
    leaving.is_lost = True
    taken, held = await successors.take_over(leaving)
    assert taken is ready
    return held


async def test_successor_holds_what_it_was_handed() -> None:
    assert await held_by_successor(None) == (6,)


async def test_successor_is_not_taken_to_hold_what_was_rolled_back_meanwhile() -> None:
    assert await held_by_successor(2) == (0,)


@pytest.mark.parametrize(
    ("begins_anew", "rolled_back_to", "holds"), [(False, None, 6), (False, 2, 2), (True, None, 0)]
)
async def test_successor_that_is_filled_anew_is_taken_to_hold_nothing_until_that_is_done(
    begins_anew: bool, rolled_back_to: int | None, holds: int
) -> None:
    leaving: Any = ScriptedLink("leaving")
    successors = SuccessorPool(rows=1)
    opened = AsyncMock(return_value=ScriptedLink("ready"))

    async def hand_over() -> None:
        while successors.prepare(leaving, opened):  # noqa: ASYNC110
            await asyncio.sleep(0)

    leaving.goes_on.set()
    await hand_over()
    leaving.fails = begins_anew
    if begins_anew:
        await hand_over()
    leaving.asked.clear()
    leaving.goes_on.clear()
    successors.prepare(leaving, opened)
    await leaving.asked.wait()
    if rolled_back_to is not None:
        successors.truncate([rolled_back_to])
    leaving.is_lost = True
    _, held = await successors.take_over(leaving)
    assert held == (holds,)


async def test_node_that_freezes_while_it_leaves_does_not_hold_up_its_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it does not hand over in time is sent again by the node before it."""
    monkeypatch.setattr(successors_module, "FINAL_HAND_OVER_TIMEOUT_S", 0.05)
    leaving: Any = ScriptedLink("leaving")
    ready: Any = ScriptedLink("ready")
    leaving.goes_on.set()
    successors = SuccessorPool(rows=1)
    while successors.prepare(leaving, AsyncMock(return_value=ready)):  # noqa: ASYNC110
        await asyncio.sleep(0)
    leaving.goes_on.clear()
    async with asyncio.timeout(10):
        assert await successors.take_over(leaving) == (ready, (6,))


@pytest.mark.parametrize("failure", [None, MissingBlocksError([(0, 2)], "no node holds them")])
async def test_successors_that_are_not_found_are_looked_for_ever_less_often(
    failure: Exception | None,
) -> None:
    """Each attempt asks members of the DHT."""
    now = 0.0
    link: Any = ScriptedLink("alone")
    successors = SuccessorPool(rows=1, clock=lambda: now)
    looks: list[float] = []

    async def look(_: object) -> None:
        looks.append(now)
        if failure is not None:
            raise failure

    for quarter in range(4 * 60):
        now = quarter / 4
        successors.refresh([link], look)
        for _ in range(4):
            await asyncio.sleep(0)
    assert looks == [0.0, 5.0, 15.0, 35.0]
    # For a node that leaves they are looked for all the same, once the last attempt is over.
    while successors.prepare(link, look):  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert successors.prepare(link, look)
    await asyncio.sleep(0)
    assert len(looks) == 5
    await successors.close()
