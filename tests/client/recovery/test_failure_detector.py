"""Nodes that are silent where they owe an answer that is no step's output."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
import torch

from nesa_node.client.recovery import failure_detector, suspicion
from nesa_node.client.session import hop
from nesa_node.client.session.base import RowSlice
from nesa_node.compression import tensors
from nesa_node.core.errors import PeerUnreachableError
from nesa_node.core.ids import PeerId
from nesa_node.swarm.protocol.replay_buffer import SentStep
from tests.client.scripted_nodes import HIDDEN, ScriptedRoute, request
from tests.client.session.test_step_pipeline import hidden, opened

LONG_S = 0.6
"""By far longer than a silent node is waited for here."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detector, "MAX_LATE_S", 0.05)
    monkeypatch.setattr(suspicion, "MAX_LATE_S", 0.05)
    monkeypatch.setattr(failure_detector, "PROBE_INTERVAL_S", 0.05)
    monkeypatch.setattr(suspicion, "PROBE_INTERVAL_S", 0.05)
    monkeypatch.setattr(hop, "NEW_STREAM_S", 0.0)
    monkeypatch.setattr(suspicion, "MIN_SUSPECT_S", 0.05)
    monkeypatch.setattr(suspicion, "MIN_LOST_S", 0.2)


async def test_node_silent_at_a_rollback_is_replaced_as_one_silent_at_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened(monkeypatch, "chain") as (session, route), asyncio.timeout(15):
        await session.step(hidden(4), [RowSlice(0, 0, 4)])
        silent = route.scripted[1]
        silent.hang()
        await session.rollback([2])
        assert silent not in route.scripted
        assert session.recoveries == 1
        assert route.search.silent_peers == frozenset()
        assert session.metrics.suspicions == Counter(raised=1, confirmed=1)


async def test_node_silent_at_a_reorder_is_avoided_and_told_as_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The chain is made anew, since it is not known which rows a node holds."""
    async with opened(monkeypatch, "chain", rows=2) as (session, route), asyncio.timeout(15):
        rows = [RowSlice(0, 0, 2), RowSlice(1, 0, 2)]
        await session.step(hidden(4), rows)
        suspected: list[PeerId] = []
        monkeypatch.setattr(
            route.selector, "record_failure", lambda peer, *_, **__: suspected.append(peer)
        )
        route.scripted[1].hang()
        await session.reorder([1, 0])
        assert suspected == ["node-1"]
        assert [loss.lost for loss in session.failovers] == [("node-1",)]


async def test_node_that_obeys_slowly_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads nothing on the session's stream meanwhile, so it is asked beside that."""
    async with opened(monkeypatch, "chain") as (session, route):
        await session.step(hidden(4), [RowSlice(0, 0, 4)])
        slow = route.scripted[1]
        slow.obeys_s = LONG_S
        await session.rollback([2])
        assert session.recoveries == 0
        assert slow.pings_beside > 1
        assert slow.pings == 0


async def test_node_silent_at_a_link_is_lost_and_a_slow_one_is_not() -> None:
    route: Any = ScriptedRoute(request("chain", rows=1, hops=3), lambda: None)
    route.selector.record_failure = lambda *_: None
    await route.rebuild([0])
    slow, silent, _ = route.scripted
    slow.obeys_s = LONG_S
    silent.hang()
    async with asyncio.timeout(15):
        with pytest.raises(PeerUnreachableError, match="node-1 did not answer"):
            await route._link_hops(route.links, {}, [0], lambda _: False)
    assert [link.is_lost for link in route.links] == [False, True, False]
    assert slow.pings_beside > 1
    await route.close()


async def test_node_whose_session_reads_slowly_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 64 queued steps a node reads no more, nor the probe behind them."""
    async with opened(monkeypatch, "chain", step_timeout_s=60.0) as (session, route):
        slow = route.scripted[0]
        slow.stop_reading(LONG_S)
        await session.step(hidden(1), [RowSlice(0, 0, 1)])
        assert session.recoveries == 0
        assert slow.pings_beside > 0


async def test_node_that_takes_no_replay_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hop, "DEFAULT_LINK_BYTES_PER_S", 1e12)
    tokens = 1 << 19
    meta, payload = tensors.encode(torch.zeros(tokens, HIDDEN))
    async with opened(monkeypatch, "chain") as (session, route), asyncio.timeout(15):
        route.scripted[0].hang()
        session._replay.record_unsent(SentStep(1, (RowSlice(0, 0, tokens),), "none", meta, payload))
        with pytest.raises(PeerUnreachableError, match="node-0 did not answer"):
            await session._replay._replay_to(route.links[0], (0,), (tokens,))
