"""When a node moves on its own: where blocks lack a holder in two looks, one after the other."""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import replace
from typing import Any

import pytest

from nesa_node.core.ids import Span
from nesa_node.server.node.move_limiter import MoveLimiter, fill_holes
from nesa_node.sharding.span_placement import plan_repairs
from nesa_node.topology.snapshot import Snapshot
from tests.server.small_swarm import TORN, UNEVEN, swarm


def _movable(snapshot: Snapshot) -> Snapshot:
    nodes = tuple(replace(node, movable=True) for node in snapshot.nodes)
    return replace(snapshot, nodes=nodes)


async def test_one_look_that_lacks_a_holder_moves_no_node() -> None:
    """A holder that restarts is back at the next look, and may be gone again at the one after."""
    torn, whole = (_movable(swarm(spans)) for spans in (TORN, UNEVEN))
    (peer,) = plan_repairs(torn, frozenset(range(4, 8)))
    looks: list[Snapshot] = []
    moves = MoveLimiter(per_hour=4, pause_s=0)

    async def look() -> Snapshot:
        looks.append((torn, whole, torn, whole, torn)[min(len(looks), 4)])
        return looks[-1]

    task = asyncio.create_task(fill_holes(look, peer, moves, every_s=0.01, rng=random.Random(1)))
    try:
        async with asyncio.timeout(10):
            wish = await moves.next_request()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert wish.span == Span(4, 8)
    assert looks == [torn, whole, torn, whole, torn, torn]


async def test_plans_for_holes_are_made_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Records of strangers, thousands of them, can make one take a second."""
    here, elsewhere = threading.get_ident(), list[bool]()
    torn = _movable(swarm(TORN))
    (peer,) = plan_repairs(torn, frozenset(range(4, 8)))

    def noting(*args: Any) -> Any:
        elsewhere.append(threading.get_ident() != here)
        return plan_repairs(*args)

    async def look() -> Snapshot:
        return torn

    monkeypatch.setattr("nesa_node.server.node.move_limiter.plan_repairs", noting)
    moves = MoveLimiter(per_hour=4, pause_s=0)
    task = asyncio.create_task(fill_holes(look, peer, moves, every_s=0.01, rng=random.Random(1)))
    try:
        async with asyncio.timeout(10):
            await moves.next_request()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert elsewhere == [True]
