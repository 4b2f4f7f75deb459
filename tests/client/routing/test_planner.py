"""What a client makes of what it has measured of nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

from nesa_node.client.routing.planner import ChainPlanner
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.routing.chains import Hop
from nesa_node.topology.snapshot import NodeState, Snapshot
from tests.client.scripted_nodes import request


async def test_a_node_that_cannot_be_measured_is_believed_half_of_what_it_claims() -> None:
    swarm: Any = SimpleNamespace(
        rtts=SimpleNamespace(ping_all=AsyncMock()), transport=SimpleNamespace(), directory=None
    )
    planner = ChainPlanner(swarm, audit=AsyncMock(return_value=None))
    node = NodeState(PeerId("evasive"), Span(0, 4), decode_tokens_per_s=100.0)
    snapshot = Snapshot(ModelId("tiny@0"), 4, (node,), taken_at=0.0)
    hops = (Hop(node.peer_id, node.span),)
    await planner.remeasure_nodes(snapshot, request("chain", rows=1, hops=4), hops)
    assert planner.claims.clamp(node).decode_tokens_per_s == 50.0
