"""Holders are spread over failure domains, against a search of every single move."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nesa_node.core.arrays import Bools, Floats
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.routing.chain_request import ChainRequest
from nesa_node.routing.placement.moves import MAX_SPREAD_COST
from nesa_node.routing.placement.placement_problem import Assignment, PlacementProblem
from nesa_node.routing.placement.plan import plan_placement
from nesa_node.routing.placement.rebalance import (
    RebalancePolicy,
    rebalance,
    require_repeated_trigger,
)
from nesa_node.routing.placement.score import Goal, score_assignment
from nesa_node.routing.placement.spread import spread_holders, spreading_moves
from nesa_node.topology.links.matrix import Links
from nesa_node.topology.snapshot import NodeState, Snapshot
from tests.routing.placement.rooms import random_room

WHOLE = ChainRequest(span=Span(0, 8))


def _exposed(room: PlacementProblem, assignment: Assignment) -> int:
    """Pairs of a domain and a block without another holder, one by one."""
    pairs = 0
    for members_N in room.domains_DN:
        for block in range(room.problem.num_blocks):
            holders = [
                node
                for node in range(room.problem.num_nodes)
                if assignment.starts_N[node] <= block < assignment.ends_N[node]
            ]
            pairs += bool(holders) and all(members_N[node] for node in holders)
    return pairs


def _room_with_domains(rng: np.random.Generator, nodes: int, blocks: int) -> PlacementProblem:
    room = random_room(rng, nodes, blocks, most=blocks // 2, replicas=int(rng.integers(1, 3)))
    domains_DN: Bools = rng.random((4, nodes)) < 0.4
    return replace(room, domains_DN=domains_DN)


def _random_assignment(room: PlacementProblem, rng: np.random.Generator) -> Assignment:
    free_N = room.problem.num_blocks - room.max_blocks_N
    return room.assign_full_spans(rng.integers(0, free_N + 1))


def test_the_first_move_is_the_one_that_leaves_fewest_blocks_exposed() -> None:
    rng = np.random.default_rng(0)
    moved = 0
    for _ in range(40):
        room = _room_with_domains(rng, 6, 9)
        now = _random_assignment(room, rng)
        assert now.count_exposed(room) == _exposed(room, now)
        best = _exposed(room, now)
        deficit = now.deficit(room)
        for node in range(6):
            width = int(room.max_blocks_N[node])
            for start in range(9 - width + 1):
                then = now.with_span(node, Span(start, start + width))
                after = then.deficit(room)
                if after.holes <= deficit.holes and after.replicas <= deficit.replicas:
                    best = min(best, _exposed(room, then))
        first = next(spreading_moves(room, now, "throughput", ()), None)
        if first is None:
            assert best == _exposed(room, now)
        else:
            assert _exposed(room, first[1]) == best < _exposed(room, now)
            moved += 1
    assert moved > 20


@pytest.mark.parametrize("goal", ["latency", "throughput"])
def test_spreading_costs_little_and_takes_no_holder_that_is_needed(goal: Goal) -> None:
    rng = np.random.default_rng(1)
    fewer = 0
    for _ in range(30):
        room = _room_with_domains(rng, 8, 10)
        now = _random_assignment(room, rng)
        spread = spread_holders(room, now, goal)
        before, after = score_assignment(room, now), score_assignment(room, spread)
        assert after.exposed == _exposed(room, spread) <= before.exposed
        assert after.deficit.holes <= before.deficit.holes
        assert after.deficit.replicas <= before.deficit.replicas
        for each in ("latency", "throughput"):
            limit = before.cost(each) * (1 + MAX_SPREAD_COST)
            assert after.cost(each) <= limit
        fewer += after.exposed < before.exposed
    assert fewer > 15


def test_without_domains_nothing_moves() -> None:
    rng = np.random.default_rng(2)
    room = random_room(rng, 6, 8, most=4)
    now = _random_assignment(room, rng)
    assert room.domains_DN.shape == (0, 6)
    assert spread_holders(room, now, "latency") is now


def _two_cities(spans: dict[str, tuple[int, int]], apart_ms: float = 60.0) -> Snapshot:
    """Nodes whose names begin with the same letter are in one city."""
    nodes = tuple(
        NodeState(PeerId(name), Span(*span), decode_tokens_per_s=100.0, max_blocks=4, movable=True)
        for name, span in spans.items()
    )
    city_N = np.array([name[0] for name in spans])
    rtt_ms_NN: Floats = np.where(city_N[:, None] == city_N, 1.0, apart_ms)
    np.fill_diagonal(rtt_ms_NN, 0.0)
    plain_NN = np.zeros_like(rtt_ms_NN)
    peers = tuple(node.peer_id for node in nodes)
    links = Links(peers, rtt_ms_NN, plain_NN + 1e9, plain_NN, plain_NN)
    return Snapshot(ModelId("m"), 8, nodes, 0.0, links=links)


def _holders_apart(spans: dict[PeerId, Span]) -> bool:
    """Whether each block has holders in both cities."""
    return all(
        {peer[0] for peer, span in spans.items() if span.start <= block < span.end} == {"a", "b"}
        for block in range(8)
    )


EACH_CITY_HAS_A_HALF = {"a1": (0, 4), "a2": (0, 4), "b1": (4, 8), "b2": (4, 8)}
A_CHAIN_IN_ONE_CITY = {"a1": (0, 4), "a2": (4, 8), "a3": (0, 4), "b1": (4, 8), "b2": (4, 8)}


def test_a_new_placement_survives_the_loss_of_a_city() -> None:
    snapshot = _two_cities(EACH_CITY_HAS_A_HALF)
    placement = plan_placement(snapshot, WHOLE, replicas=2)
    assert placement.exposed == 0
    assert _holders_apart(dict(placement.spans))


def test_rebalancing_spreads_where_nothing_else_is_to_do() -> None:
    snapshot = _two_cities(A_CHAIN_IN_ONE_CITY)
    moves = rebalance(snapshot, WHOLE, replicas=2)
    assert (moves.trigger, moves.before.exposed, moves.after.exposed) == ("spread", 4, 0)
    spans = {node.peer_id: node.span for node in snapshot.nodes}
    spans |= {move.peer_id: move.after for move in moves.moves}
    assert _holders_apart(spans)
    assert len(moves.moves) == 1
    assert moves.after.latency_s <= moves.before.latency_s
    assert require_repeated_trigger(None, moves).moves == ()
    assert (
        "failure domains: 4 before, 0 after, seen only once"
        in require_repeated_trigger(None, moves).refused
    )
    assert require_repeated_trigger(moves, moves) == moves


def test_spreading_for_latency_does_not_take_the_throughput() -> None:
    """The only node that could move is needed where it is."""
    snapshot = _two_cities(A_CHAIN_IN_ONE_CITY)
    speeds = {"a1": 100.0, "a3": 100.0, "a2": 11.0, "b1": 10.0, "b2": 10.0}
    nodes = tuple(
        replace(node, decode_tokens_per_s=speeds[node.peer_id]) for node in snapshot.nodes
    )
    moves = rebalance(replace(snapshot, nodes=nodes), WHOLE, replicas=2)
    assert moves.before.exposed == 4
    assert moves.trigger != "spread"


def test_a_hole_is_repaired_by_the_node_that_is_there_first() -> None:
    """One in another city, which would spread the holders, has to load three times as much."""
    snapshot = _two_cities({"a1": (0, 4), "a2": (3, 7), "a3": (3, 7), "b1": (0, 4), "b2": (0, 4)})
    (move,) = rebalance(snapshot, WHOLE, replicas=1).moves
    assert move.peer_id in ("a2", "a3")
    assert move.load_bytes == 1e9


def test_pinned_nodes_are_not_moved_to_spread_holders() -> None:
    snapshot = _two_cities(A_CHAIN_IN_ONE_CITY)
    pinned = frozenset({PeerId("b1"), PeerId("b2"), PeerId("a3")})
    assert rebalance(snapshot, WHOLE, replicas=2, pinned=pinned).moves == ()


def test_a_city_that_alone_has_the_memory_is_left_as_it_is() -> None:
    """The other city's node holds all it can, wherever it is."""
    snapshot = _two_cities({"a1": (0, 4), "a2": (4, 8), "a3": (0, 4), "a4": (4, 8), "b1": (0, 4)})
    assert rebalance(snapshot, WHOLE, replicas=2).moves == ()


def test_no_gain_takes_the_only_holders_in_another_city() -> None:
    """Without known round trips the same swarm moves one of its fast nodes to the slow half."""
    spans = {"a1": (0, 4), "b1": (0, 4), "a2": (4, 8), "b2": (4, 8)}
    snapshot = _two_cities(spans)
    nodes = tuple(
        replace(node, decode_tokens_per_s=100.0 if node.peer_id[1] == "1" else 10.0)
        for node in snapshot.nodes
    )
    snapshot = replace(snapshot, nodes=nodes)
    one = RebalancePolicy(max_moves=1)
    moves = rebalance(snapshot, WHOLE, goal="throughput", replicas=1, policy=one)
    assert moves.moves == ()
    unknown = replace(snapshot, links=None)
    moves = rebalance(unknown, WHOLE, goal="throughput", replicas=1, policy=one)
    assert moves.trigger == "gain"
