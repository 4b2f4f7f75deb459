"""What a session tells, and what of it a successor forgets."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.swarm.protocol.messages import (
    VERSION,
    ErrorMessage,
    Linked,
    Opened,
    Ping,
    Pong,
    PushOpen,
    PushOpened,
    Reordered,
)
from tests.server.bench import open_node
from tests.server.session.test_session_server import end, opened


async def test_pong_tells_the_bytes_that_came_from_the_node_before(blocks: ModelBlocks) -> None:
    """By them a client knows a slow link from a node that is gone."""
    async with open_node(blocks) as node:
        peer = node.peer()
        peer.open(upstream="up")
        await peer.wire.hear_a(Opened)
        peer.link(upstream="up")
        await peer.wire.hear_a(Linked)
        peer.wire.say(Ping(nonce=1))
        assert (await peer.wire.hear_a(Pong)).upstream_bytes == 0
        wire = node.connect("up")
        cast(Any, wire).raw_bytes_received = 77
        wire.say(PushOpen(version=VERSION, session=peer.session, secret=peer.secret, epoch=1))
        await wire.hear_a(PushOpened)
        peer.wire.say(Ping(nonce=2))
        assert (await peer.wire.hear_a(Pong)).upstream_bytes == 77
        wire.hang_up()
        await end(peer)


async def test_successor_forgets_rows_that_are_reordered(
    blocks: ModelBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_node(blocks) as node:
        peer = await opened(node, rows=3)
        peer.step({0: 4, 1: 5, 2: 6})
        await peer.output()
        (session,) = node.server._sessions.values()
        kept: list[Sequence[int]] = []
        monkeypatch.setattr(session.donor, "truncate", kept.append)
        peer.reorder([2, 0, 0])
        await peer.wire.hear_a(Reordered)
        assert kept == [[0, 0, 0]]
        await end(peer)


async def test_node_that_gives_its_blocks_up_opens_no_session(blocks: ModelBlocks) -> None:
    async with open_node(blocks) as node:
        peer = await opened(node)
        drain = asyncio.create_task(node.server.drain(20.0))
        await asyncio.sleep(0)
        late = node.peer("late")
        late.open()
        assert (await late.wire.hear_a(ErrorMessage)).code == "draining"
        peer.step({0: 3})
        await peer.output()
        await end(peer)
        await drain


@pytest.mark.parametrize("mode", ["star", "chain"])
async def test_room_for_hidden_states_of_all_tokens_is_promised(
    blocks: ModelBlocks, mode: str
) -> None:
    """Those of waiting steps come in few bytes: thirty kilobytes may be zeros for a gigabyte."""
    async with open_node(blocks) as node:
        peer = await opened(node, rows=2, max_tokens=100, mode=mode)
        assert node.admission._hidden_bytes == 2 * 100 * blocks.hidden_size * 4
        await end(peer)
        assert node.admission._hidden_bytes == 0


async def test_step_that_does_not_fit_is_not_decoded(blocks: ModelBlocks) -> None:
    async with open_node(blocks) as node:
        peer = await opened(node)
        peer.lengths = [1]
        bad = peer.step({0: 2}, torch.full((2, blocks.hidden_size), math.nan))
        refused = await peer.wire.hear_a(ErrorMessage)
        assert (refused.code, refused.step) == ("bad_position", bad.step)
        peer.lengths = [0]
        peer.step({0: 2})
        await peer.output()
        await end(peer)
