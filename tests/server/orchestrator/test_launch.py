"""What a node wishes for when it reads placements."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from nesa_node.core.ids import Span
from nesa_node.core.settings.models import NodeConfig
from nesa_node.server.orchestrator import launch as orchestrate
from nesa_node.server.orchestrator.launch import follow_placements, run_follower
from nesa_node.swarm.dht.sealing import PlacementNotice
from nesa_node.topology.snapshot import Snapshot
from tests.server.small_swarm import (
    BLOCKS,
    BOSS,
    MODEL,
    TO_SECOND,
    UNEVEN,
    A,
    node,
    placement,
    swarm,
)
from tests.swarm.local_swarm import local_swarm


class _Wish:
    async def wait(self) -> str:
        return "moved"


class _Moves:
    def __init__(self) -> None:
        self.asked: list[tuple[Span, str]] = []
        self.begun = asyncio.Event()

    def request_move(self, span: Span, reason: str) -> _Wish:
        self.asked.append((span, reason))
        self.begun.set()
        return _Wish()


class _Board:
    async def fetch(self, *_: object) -> list[PlacementNotice]:
        return [placement(*TO_SECOND)]


async def _follow_until_a_wish(
    look: Callable[[], Awaitable[Snapshot]], now: Snapshot, moves: _Moves
) -> None:
    task = asyncio.create_task(
        follow_placements(
            _Board(),  # type: ignore[arg-type]
            lambda: now,
            look,
            MODEL,
            node(),
            moves,
            every_s=0.01,
            rng=random.Random(1),
        )
    )
    async with asyncio.timeout(5):
        await moves.begun.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_follower_survives_a_mistake() -> None:
    moves, now = _Moves(), swarm(UNEVEN)
    failures = iter([ValueError("ours"), KeyError("ours")])

    async def look() -> Snapshot:
        for error in failures:
            raise error
        return now

    await _follow_until_a_wish(look, now, moves)


async def test_nobody_is_asked_for_placements_that_do_not_name_this_node() -> None:
    looked = 0
    fetched = asyncio.Event()

    class Board:
        async def fetch(self, *_: object) -> list[PlacementNotice]:
            if looks_at_board():
                fetched.set()
            return [placement((A, (0, 4), (4, 8)))]

    times = iter(range(100))

    def looks_at_board() -> bool:
        return next(times) >= 3

    async def look() -> Snapshot:
        nonlocal looked
        looked += 1
        return swarm(UNEVEN)

    task = asyncio.create_task(
        follow_placements(
            Board(),  # type: ignore[arg-type]
            lambda: swarm(UNEVEN),
            look,
            MODEL,
            node(),
            _Moves(),
            every_s=0.01,
            rng=random.Random(1),
        )
    )
    async with asyncio.timeout(5):
        await fetched.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert looked == 0


async def test_follower_wishes_for_what_it_is_willing_to_do() -> None:
    moves, now = _Moves(), swarm(UNEVEN)

    async def look() -> Snapshot:
        return now

    await _follow_until_a_wish(look, now, moves)
    span, reason = moves.asked[0]
    assert span == Span(4, 8)
    assert reason.startswith("placement 3.1@")


async def test_placements_of_allowed_orchestrators_are_not_pushed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger may publish as many as a member keeps."""
    monkeypatch.setattr(orchestrate, "follow_placements", AsyncMock())
    config = NodeConfig(model="m", allow_orchestrators=(BOSS,))
    async with local_swarm(tmp_path, 1) as (member,):
        await run_follower(config, member, MODEL, node(), cast(Any, _Moves()), num_blocks=BLOCKS)
        assert BOSS in member.notices._pinned
