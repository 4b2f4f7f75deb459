"""Which nodes a client pings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from nesa_node.client.routing.measurements import MAX_PINGED, LatencyView
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.swarm.p2p.link_measurements import LinkSpeeds, RttTable
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
