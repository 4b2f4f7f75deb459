from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nesa_node.core.errors import MissingBlocksError
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.routing.chain_request import ChainRequest
from nesa_node.routing.chains import Hop, chain_cost_s, fill_gaps, plan_chain
from nesa_node.routing.strategies import make_strategy
from nesa_node.topology.links.matrix import Links
from nesa_node.topology.snapshot import NodeState, Snapshot

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def _node(name: str, start: int, end: int, speed: float = 10.0, load: float = 0.0) -> NodeState:
    return NodeState(
        PeerId(name), Span(start, end), decode_tokens_per_s=speed, load=load, free_cache_tokens=100
    )


def _snapshot(blocks: int, *nodes: NodeState) -> Snapshot:
    return Snapshot(ModelId("m@0"), blocks, nodes, 0.0)


def _cheapest_by_trying_everything(
    snapshot: Snapshot, span: Span, penalties: dict[PeerId, float]
) -> float:
    """Every sequence of distinct peers and every place to cut between them."""
    best = math.inf

    def extend(position: int, hops: tuple[Hop, ...]) -> None:
        nonlocal best
        if position == span.end:
            best = min(
                best, chain_cost_s(snapshot, ChainRequest(span=span, penalties_s=penalties), hops)
            )
            return
        used = {hop.peer_id for hop in hops}
        for node in snapshot.nodes:
            if node.peer_id in used or not node.span.start <= position < node.span.end:
                continue
            for end in range(position + 1, min(node.span.end, span.end) + 1):
                extend(end, (*hops, Hop(node.peer_id, Span(position, end))))

    extend(span.start, ())
    return best


@settings(max_examples=400)
@given(st.integers(0, 2**32))
def test_chain_is_as_cheap_as_exhaustive_search_finds(seed: int) -> None:
    rng = random.Random(seed)
    blocks = rng.randint(1, 7)
    nodes = []
    for index in range(rng.randint(1, 7)):
        start = rng.randrange(blocks)
        end = rng.randint(start + 1, blocks)
        nodes.append(_node(f"p{index}", start, end, rng.choice([0.2, 1, 10, 100]), rng.random()))
    snapshot = _snapshot(blocks, *nodes)
    penalties = {node.peer_id: rng.choice([0.0, 0.0, 0.5]) for node in nodes}
    start = rng.randrange(blocks)
    span = Span(start, rng.randint(start + 1, blocks))
    best = _cheapest_by_trying_everything(snapshot, span, penalties)
    try:
        hops = plan_chain(snapshot, ChainRequest(span=span, penalties_s=penalties))
    except MissingBlocksError:
        assert best == math.inf
        return
    _check_shape(snapshot, span, hops)
    cost = chain_cost_s(snapshot, ChainRequest(span=span, penalties_s=penalties), hops)
    assert cost == pytest.approx(best, rel=1e-9)


def _check_shape(snapshot: Snapshot, span: Span, hops: tuple[Hop, ...]) -> None:
    assert len({hop.peer_id for hop in hops}) == len(hops)
    assert [hop.span.start for hop in hops] == [span.start, *(hop.span.end for hop in hops[:-1])]
    assert hops[-1].span.end == span.end
    held = {node.peer_id: node.span for node in snapshot.nodes}
    assert all(held[hop.peer_id].covers(hop.span) for hop in hops)


def test_slow_node_is_not_entered_twice_around_a_fast_one() -> None:
    """The relaxed optimum is a, b, a; a chain must not return."""
    snapshot = _snapshot(6, _node("a", 0, 6, speed=0.5), _node("b", 2, 4, speed=1000.0))
    hops = plan_chain(snapshot, ChainRequest(span=Span(0, 6)))
    assert hops == (Hop(A, Span(0, 6)),)


def test_node_is_used_in_part_where_a_faster_one_takes_over() -> None:
    snapshot = _snapshot(6, _node("a", 0, 6, speed=0.5), _node("b", 2, 6, speed=1000.0))
    assert plan_chain(snapshot, ChainRequest(span=Span(0, 6))) == (
        Hop(A, Span(0, 2)),
        Hop(B, Span(2, 6)),
    )


def test_chain_avoids_a_penalised_node_that_has_a_replica() -> None:
    snapshot = _snapshot(4, _node("a", 0, 4), _node("b", 0, 4, speed=9.0))
    assert plan_chain(snapshot, ChainRequest(span=Span(0, 4)))[0].peer_id == A
    hops = plan_chain(snapshot, ChainRequest(span=Span(0, 4), penalties_s={A: 5.0}))
    assert hops[0].peer_id == B


def test_chain_goes_through_a_penalised_node_that_is_the_only_one() -> None:
    snapshot = _snapshot(4, _node("a", 0, 4))
    assert plan_chain(snapshot, ChainRequest(span=Span(0, 4), penalties_s={A: 1e6}))[0].peer_id == A


def test_loaded_node_loses_to_an_idle_one() -> None:
    snapshot = _snapshot(4, _node("a", 0, 4, load=3.0), _node("b", 0, 4))
    assert plan_chain(snapshot, ChainRequest(span=Span(0, 4)))[0].peer_id == B


def test_excluded_and_full_nodes_are_not_used() -> None:
    snapshot = _snapshot(4, _node("a", 0, 4), _node("b", 0, 4))
    assert (
        plan_chain(snapshot, ChainRequest(span=Span(0, 4), exclude=frozenset({A})))[0].peer_id == B
    )
    with pytest.raises(MissingBlocksError):
        plan_chain(snapshot, ChainRequest(span=Span(0, 4), min_free_tokens=101))


def test_missing_blocks_are_named() -> None:
    snapshot = _snapshot(8, _node("a", 0, 2), _node("b", 4, 6))
    with pytest.raises(MissingBlocksError, match=r"2:4, 6:8") as caught:
        plan_chain(snapshot, ChainRequest(span=Span(0, 8)))
    assert caught.value.missing == ((2, 4), (6, 8))


def test_part_of_the_model_can_be_planned() -> None:
    snapshot = _snapshot(8, _node("a", 0, 5), _node("b", 3, 8))
    hops = plan_chain(snapshot, ChainRequest(span=Span(2, 7)))
    assert hops[0].span.start == 2
    assert hops[-1].span.end == 7


def test_equal_chains_are_chosen_by_peer_id() -> None:
    snapshot = _snapshot(4, _node("c", 0, 4), _node("a", 0, 4), _node("b", 0, 4))
    assert plan_chain(snapshot, ChainRequest(span=Span(0, 4))) == (Hop(A, Span(0, 4)),)


def test_hundred_nodes_are_planned() -> None:
    rng = random.Random(0)
    nodes = [_node("all", 0, 80, speed=0.2)]
    for index in range(100):
        start = rng.randrange(80)
        nodes.append(_node(f"{index:03}", start, rng.randint(start + 1, 80), rng.choice([1, 100])))
    snapshot = _snapshot(80, *nodes)
    hops = plan_chain(snapshot, ChainRequest(span=Span(0, 80)))
    _check_shape(snapshot, Span(0, 80), hops)


def _linked(snapshot: Snapshot, rtt_ms: dict[tuple[str, str], float]) -> Snapshot:
    """The snapshot with those round trips; all others are 100 ms."""
    peers = [node.peer_id for node in snapshot.nodes]
    rtt_ms_NN = np.full((len(peers), len(peers)), 100.0)
    np.fill_diagonal(rtt_ms_NN, 0.0)
    for (one, other), value in rtt_ms.items():
        row, column = peers.index(PeerId(one)), peers.index(PeerId(other))
        rtt_ms_NN[row, column] = rtt_ms_NN[column, row] = value
    blank = Links.unknown(peers)
    return replace(snapshot, links=replace(blank, rtt_ms_NN=rtt_ms_NN))


def test_chain_stays_among_nodes_that_are_near_each_other() -> None:
    nodes = [_node("a", 0, 2), _node("b", 2, 4), _node("c", 2, 4, speed=11.0)]
    snapshot = _snapshot(4, *nodes)
    assert plan_chain(snapshot, ChainRequest(span=Span(0, 4)))[1].peer_id == C
    near = _linked(snapshot, {("a", "b"): 5.0})
    assert [hop.peer_id for hop in plan_chain(near, ChainRequest(span=Span(0, 4)))] == [A, B]


def test_chain_begins_near_a_client_who_has_measured() -> None:
    snapshot = _snapshot(4, _node("a", 0, 4), _node("b", 0, 4))
    assert plan_chain(snapshot, ChainRequest(span=Span(0, 4)))[0].peer_id == A
    hops = plan_chain(snapshot, ChainRequest(span=Span(0, 4), entry_rtt_ms={A: 80.0, B: 3.0}))
    assert hops[0].peer_id == B


def test_gap_is_filled_near_its_neighbours() -> None:
    nodes = [_node("a", 0, 2), _node("b", 2, 4), _node("c", 2, 4), _node("d", 4, 6)]
    snapshot = _linked(_snapshot(6, *nodes), {("a", "c"): 5.0, ("c", "d"): 5.0})
    kept = (Hop(A, Span(0, 2)), Hop(PeerId("d"), Span(4, 6)))
    # The client is nearer to the other, which does not matter inside a chain.
    request = ChainRequest(span=Span(0, 6), entry_rtt_ms={B: 1.0, C: 300.0})
    filled = fill_gaps(snapshot, request, kept)
    assert filled[1] == Hop(C, Span(2, 4))


def test_one_peer_does_not_fill_two_gaps() -> None:
    """A chain whose hops are one peer would be ended by one failure, twice."""
    nodes = [_node("a", 0, 6, speed=1000.0), _node("b", 2, 4), _node("c", 4, 6)]
    kept = (Hop(B, Span(2, 4)),)
    filled = fill_gaps(_snapshot(6, *nodes), ChainRequest(span=Span(0, 6)), kept)
    assert filled == (Hop(A, Span(0, 2)), *kept, Hop(C, Span(4, 6)))


def test_another_strategy_can_choose() -> None:
    snapshot = _snapshot(4, _node("a", 0, 4, load=0.9, speed=30.0), _node("b", 0, 4))
    assert plan_chain(snapshot, ChainRequest(span=Span(0, 4)))[0].peer_id == A
    strategy = make_strategy("exact-throughput", np.random.default_rng(0))
    assert (
        plan_chain(snapshot, ChainRequest(span=Span(0, 4)), choose=strategy.choose)[0].peer_id == B
    )
