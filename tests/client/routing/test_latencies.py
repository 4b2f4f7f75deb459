"""Which nodes a client pings, and what it makes of the links that it has seen."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

from nesa_node.client.routing.measurements import MAX_PINGED, LatencyView
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.swarm.p2p.link_measurements import LinkSpeeds, RttTable
from nesa_node.topology.links.matrix import MeasuredLink, peer_digest
from nesa_node.topology.snapshot import NodeState, Snapshot


async def test_of_many_holders_of_an_end_few_are_pinged(monkeypatch: pytest.MonkeyPatch) -> None:
    distances, measure = RttTable(), AsyncMock()
    monkeypatch.setattr(distances, "ping_all", measure)
    swarm: Any = SimpleNamespace(
        identity=SimpleNamespace(peer_id=PeerId("client")),
        directory=SimpleNamespace(measured_links=lambda _: {}),
        transport=SimpleNamespace(),
        rtts=distances,
        link_speeds=LinkSpeeds(),
    )
    first = [NodeState(PeerId(f"a{number}"), Span(0, 2)) for number in range(2 * MAX_PINGED)]
    last = [NodeState(PeerId(f"b{number}"), Span(2, 4)) for number in range(2 * MAX_PINGED)]
    snapshot = Snapshot(ModelId("tiny@0"), 4, (*first, *last), taken_at=0.0)
    await LatencyView(swarm).add_links(snapshot, Span(0, 4))
    assert measure.await_args is not None
    asked = [str(peer) for peer in measure.await_args.args[1]]
    assert sorted(peer[0] for peer in asked) == ["a"] * MAX_PINGED + ["b"] * MAX_PINGED


async def test_stability_is_of_the_links_seen_and_computed_only_where_it_is_read() -> None:
    """One node's links double at every second look; the others' stay."""
    peers = [PeerId(name) for name in "abcdef"]
    looks = itertools.count()

    def measured(_: Snapshot) -> dict[PeerId, list[MeasuredLink]]:
        shaky_ms = (10.0, 20.0)[next(looks) // 2 % 2]  # both views look
        return {
            one: [
                MeasuredLink(
                    peer_digest(other), shaky_ms if "c" in one + other else 10.0, math.nan, 0.0
                )
                for other in peers
                if other != one
            ]
            for one in peers
        }

    swarm: Any = SimpleNamespace(
        identity=SimpleNamespace(peer_id=PeerId("client")),
        directory=SimpleNamespace(measured_links=measured),
        transport=SimpleNamespace(),
        rtts=RttTable(),
        link_speeds=LinkSpeeds(),
    )
    swarm.rtts.ping_all = AsyncMock()
    nodes = tuple(NodeState(peer, Span(0, 4)) for peer in peers)
    snapshot = Snapshot(ModelId("tiny@0"), 4, nodes, taken_at=0.0)
    view, idle = LatencyView(swarm), LatencyView(swarm)
    for _ in range(8):
        await view.add_links(snapshot, Span(0, 4), with_stability=True)
        await idle.add_links(snapshot, Span(0, 4))
    assert {*view.stability} == {*peers}
    assert view.stability[PeerId("c")] < 0.9
    assert all(view.stability[peer] == pytest.approx(1.0) for peer in peers if peer != "c")
    assert idle.stability == {}
    assert not idle._heights
    before = np.array(list(view.stability.values()))
    await view.add_links(snapshot, Span(0, 4), may_ping=False, with_stability=True)
    assert np.array_equal(before, list(view.stability.values()))
    assert len(view._heights) == 8
