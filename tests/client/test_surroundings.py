"""Which nodes a client pings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from nesa_node.client.surroundings import MAX_PINGED, Surroundings
from nesa_node.core.ids import ModelId, PeerId
from nesa_node.core.span import Span
from nesa_node.swarm.distances import Distances
from nesa_node.swarm.link_speed import LinkSpeeds
from nesa_node.topology.snapshot import NodeState, Snapshot


async def test_of_many_holders_of_an_end_few_are_pinged(monkeypatch: pytest.MonkeyPatch) -> None:
    distances, measure = Distances(), AsyncMock()
    monkeypatch.setattr(distances, "measure", measure)
    swarm: Any = SimpleNamespace(
        identity=SimpleNamespace(peer_id=PeerId("client")),
        directory=SimpleNamespace(measured=lambda _: {}),
        transport=SimpleNamespace(),
        distances=distances,
        speeds=LinkSpeeds(),
    )
    first = [NodeState(PeerId(f"a{number}"), Span(0, 2)) for number in range(2 * MAX_PINGED)]
    last = [NodeState(PeerId(f"b{number}"), Span(2, 4)) for number in range(2 * MAX_PINGED)]
    snapshot = Snapshot(ModelId("tiny@0"), 4, (*first, *last), taken_at=0.0)
    await Surroundings(swarm).look(snapshot, Span(0, 4))
    assert measure.await_args is not None
    asked = [str(peer) for peer in measure.await_args.args[1]]
    assert sorted(peer[0] for peer in asked) == ["a"] * MAX_PINGED + ["b"] * MAX_PINGED
