"""What a client makes of what it has measured of nodes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
import torch

from nesa_node.client.routing.planner import MIN_PROMPT_TOKENS, PUBLISHED_FRESH_S, ChainPlanner
from nesa_node.client.routing.request import ConnectionOptions, RouteRequest
from nesa_node.core.errors import PeerUnreachableError
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.routing.chain_request import TOKENS_PER_SESSION, CostWeights
from nesa_node.routing.chains import Hop
from nesa_node.routing.reputation import MAX_LOST_AUDITS, distrust_s
from nesa_node.routing.strategies import LatencyStrategy
from nesa_node.routing.tuner import Tuning
from nesa_node.swarm.dht.sealing import PlacementNotice
from nesa_node.swarm.protocol.link_encoder import link_cost
from nesa_node.topology.snapshot import NodeState, Snapshot
from tests.client.scripted_nodes import request
from tests.swarm.notice_fields import PEERS, make_notice


async def test_a_node_that_cannot_be_measured_is_believed_half_of_what_it_claims() -> None:
    swarm: Any = SimpleNamespace(
        rtts=SimpleNamespace(ping_all=AsyncMock()), transport=SimpleNamespace(), directory=None
    )
    planner = ChainPlanner(swarm, measure_speed=AsyncMock(return_value=None))
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


def _planner_of(snapshot: Snapshot) -> ChainPlanner:
    swarm: Any = SimpleNamespace(directory=SimpleNamespace(blames=lambda _: {}), rtts=None)
    planner = ChainPlanner(swarm)
    planner.latencies = SimpleNamespace(  # type: ignore[assignment]
        add_links=AsyncMock(return_value=(snapshot, {})), stability={}
    )
    return planner


def _asked(quality: str, **fields: Any) -> RouteRequest:
    defaults: dict[str, Any] = {
        "rows": 2,
        "max_tokens": 1000,
        "hidden_size": 512,
        "dtype": "float32",
    }
    options = ConnectionOptions(quality=quality)
    return RouteRequest(
        model_id=ModelId("tiny@0"), span=Span(0, 4), options=options, **(defaults | fields)
    )


WHOLE = (NodeState(PeerId("a"), Span(0, 4), decode_tokens_per_s=1.0),)
SWARM = Snapshot(ModelId("tiny@0"), 4, WHOLE, taken_at=0.0)


async def test_of_equal_nodes_one_that_passed_audits_is_chosen() -> None:
    passed = {PeerId("b"): 300}
    nodes = tuple(NodeState(PeerId(name), Span(0, 4), decode_tokens_per_s=1.0) for name in "abc")
    snapshot = Snapshot(ModelId("tiny@0"), 4, nodes, taken_at=0.0)
    planner = _planner_of(snapshot)
    view = await planner.build_view(snapshot, _asked("none"), may_ping=True)
    assert not planner.chain_request(view).penalties_s
    planner.distrust_s = lambda peer: distrust_s(passed.get(peer, 0))
    penalties_s = planner.chain_request(view).penalties_s
    assert penalties_s[PeerId("a")] == penalties_s[PeerId("c")] == 4 * penalties_s[PeerId("b")] > 0
    # By less than a millisecond: speed matters more.
    assert penalties_s[PeerId("a")] < 1e-3
    await planner.close()


def test_lost_audits_weigh_more_than_none_and_at_last_more_than_speed() -> None:
    unknown_s, lost_s, left_s = (distrust_s(0, lost) for lost in (0, 1, MAX_LOST_AUDITS))
    assert unknown_s < lost_s < 2 * unknown_s
    assert left_s > 1.0


@pytest.mark.parametrize("quality", ["exact", "none"])
async def test_without_compression_a_token_is_counted_as_it_is(quality: str) -> None:
    planner = _planner_of(SWARM)
    view = await planner.build_view(SWARM, _asked(quality), may_ping=False)
    asked = planner.chain_request(view)
    assert (asked.message_s, asked.bytes_per_token, asked.prompt_tokens) == (None, 2048, 0)


async def test_bytes_that_count_are_those_of_the_links_codec() -> None:
    """int8 in blocks of 16 with 8 channels in 16 bits is near a quarter of float32."""
    planner = _planner_of(SWARM)
    view = await planner.build_view(SWARM, _asked("int8:16:8"), may_ping=False)
    message_s = planner.chain_request(view).message_s
    assert message_s is not None
    cost = link_cost("int8@2:16:8", 512, torch.float32)
    slow, slower = message_s(2048.0, np.array([1e4, 1e3])).tolist()
    sent_bytes = (slower - slow) / (1 / 1e3 - 1 / 1e4)
    assert sent_bytes == pytest.approx(2048 * cost.ratio)
    assert 0.25 * 2048 < sent_bytes < 0.35 * 2048
    floor = await planner.build_view(SWARM, _asked("high"), may_ping=False)
    chosen_s = planner.chain_request(floor).message_s
    assert chosen_s is not None
    fast = np.array([1e9])
    assert chosen_s(2e6, fast).tolist() == [2e6 / 1e9]
    assert chosen_s(2e6, np.array([1e5]))[0] < 0.5 * 2e6 / 1e5


async def test_what_a_codec_would_make_longer_is_sent_as_it_is() -> None:
    planner = _planner_of(SWARM)
    asked = _asked("bfloat16", dtype="bfloat16", hidden_size=64)
    view = await planner.build_view(SWARM, asked, may_ping=False)
    assert [each.ratio for each in view.codecs] == [1.0]


@pytest.mark.parametrize(
    ("prompt", "kept", "expected"),
    [
        (MIN_PROMPT_TOKENS - 1, False, (0, TOKENS_PER_SESSION)),
        (MIN_PROMPT_TOKENS, False, (MIN_PROMPT_TOKENS, TOKENS_PER_SESSION)),
        (1980, False, (1980, 10)),
        (5000, False, (5000, 1)),
        (1980, True, (0, TOKENS_PER_SESSION)),
    ],
)
async def test_a_long_prompt_counts_in_the_first_chain(
    prompt: int, kept: bool, expected: tuple[int, int]
) -> None:
    """Over two rows of 1000 tokens: what the rows have left are the steps that follow."""
    planner = _planner_of(SWARM)
    asked = _asked("exact", prompt_tokens=prompt)
    view = await planner.build_view(SWARM, asked, may_ping=False)
    view = replace(view, prompt_tokens=prompt)
    keep = (Hop(PeerId("a"), Span(0, 4)),) if kept else ()
    plan = planner.plan_chain(view, keep, exclude=frozenset(), min_free_tokens=0)
    assert (plan.request.prompt_tokens, plan.request.output_tokens) == expected
    assert planner.chain_request(view).prompt_tokens == 0
