"""What a client makes of what it has measured of nodes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

from nesa_node.client.routing.planner import PUBLISHED_FRESH_S, ChainPlanner
from nesa_node.core.errors import PeerUnreachableError
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.routing.chain_request import CostWeights
from nesa_node.routing.chains import Hop
from nesa_node.routing.strategies import LatencyStrategy
from nesa_node.routing.tuner import Tuning
from nesa_node.swarm.dht.sealing import PlacementNotice
from nesa_node.topology.snapshot import NodeState, Snapshot
from tests.client.scripted_nodes import request
from tests.swarm.notice_fields import PEERS, make_notice


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


def _placement(signer: int, weights: CostWeights) -> PlacementNotice:
    values = Tuning(weights=weights).published()
    told = {"version": 1, "at": 1e9, "values": values, "why": "gain"}
    identity: Any = SimpleNamespace(peer_id=PEERS[signer])
    found = make_notice(PlacementNotice, identity, 1e9, exponents=told)
    assert isinstance(found, PlacementNotice)
    return found


def _published(planner: ChainPlanner) -> CostWeights | None:
    assert isinstance(planner.strategy, LatencyStrategy)
    return planner.strategy.published


async def test_default_strategy_weighs_as_the_longest_known_orchestrator_publishes() -> None:
    """Fetched once a minute, without a session that waits; stability is read as its weight says."""
    now = [0.0]
    tuned, other = CostWeights(failure=2.0, stability=0.5), CostWeights(load=0.5)
    known_s = {PeerId(PEERS[0]): 1.0, PeerId(PEERS[1]): 2.0}
    fetch = AsyncMock(return_value=[_placement(0, other), _placement(1, tuned)])
    swarm: Any = SimpleNamespace(
        notices=SimpleNamespace(
            fetch=fetch, peer_ages=SimpleNamespace(known_s=known_s.__getitem__)
        ),
        directory=SimpleNamespace(blames=lambda _: {}),
        rtts=None,
    )
    planner = ChainPlanner(swarm, clock=lambda: now[0])
    nodes = tuple(NodeState(PeerId(name), Span(0, 4)) for name in "ab")
    snapshot = Snapshot(ModelId("tiny@0"), 4, nodes, taken_at=0.0)
    planner.latencies = SimpleNamespace(  # type: ignore[assignment]
        add_links=AsyncMock(return_value=(snapshot, {})), stability={PeerId("a"): 0.25}
    )
    asked = request("chain", rows=1, hops=4)
    first = await planner.build_view(snapshot, asked, may_ping=True)
    assert not planner.chain_request(first).stability
    await asyncio.sleep(0)
    assert _published(planner) == tuned
    second = await planner.build_view(snapshot, asked, may_ping=True)
    assert planner.chain_request(second).stability == {PeerId("a"): 0.25}
    assert fetch.await_count == 1
    now[0] = PUBLISHED_FRESH_S
    fetch.side_effect = PeerUnreachableError("no member answers")
    await planner.build_view(snapshot, asked, may_ping=True)
    await asyncio.sleep(0)
    assert fetch.await_count == 2
    assert _published(planner) == tuned
    now[0], fetch.side_effect = 2 * PUBLISHED_FRESH_S, None
    fetch.return_value = []
    await planner.build_view(snapshot, asked, may_ping=True)
    await asyncio.sleep(0)
    assert _published(planner) is None
    await planner.close()
