from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.routing.chain_request import (
    Chain,
    ChainProblem,
    ChainRequest,
    build_problem,
    step_time,
)
from nesa_node.routing.placement.assignment_search import (
    MAX_ASSIGNMENTS,
    count_assignments,
    find_best_assignment,
)
from nesa_node.routing.placement.placement_problem import (
    Assignment,
    CoverageDeficit,
    PlacementProblem,
)
from nesa_node.routing.placement.plan import find_assignment, improve_assignment, plan_placement
from nesa_node.routing.placement.recipes import RECIPES, apply_recipe
from nesa_node.routing.placement.score import Goal, score_assignment
from nesa_node.routing.search.exact import solve_latency
from nesa_node.topology.simulation.world import World, make_world
from nesa_node.topology.snapshot import NodeState, Snapshot
from tests.routing.placement.rooms import random_room
from tests.routing.problems import least_by_trying_everything

GOALS: tuple[Goal, ...] = ("latency", "throughput")


def _request(world: World, client: int = 0) -> ChainRequest:
    return ChainRequest(
        span=Span(0, world.snapshot.num_blocks),
        entry_rtt_ms=world.client_rtt_ms_CN[client],
        entry_bytes_per_s=world.client_up_bytes_per_s_CN[client],
        exit_bytes_per_s=world.client_down_bytes_per_s_CN[client],
    )


def _total_s(problem: ChainProblem, chain: Chain) -> float:
    return step_time(problem, chain).total_s


def _best_of_every_span(room: PlacementProblem, goal: Goal) -> tuple[CoverageDeficit, float]:
    """Of all spans of all lengths, not only the longest ones that fit."""
    blocks = room.problem.num_blocks
    choices = [
        [(0, 0)]
        + [
            (start, end)
            for start in range(blocks)
            for end in range(start + 1, min(blocks, start + int(most)) + 1)
        ]
        for most in room.max_blocks_N
    ]
    best = (CoverageDeficit(blocks + 1, 0), np.inf)
    for spans in itertools.product(*choices):
        bounds = np.array(spans, dtype=np.int64)
        layout = Assignment(bounds[:, 0], bounds[:, 1])
        lacks = layout.deficit(room)
        if lacks > best[0]:
            continue
        if goal == "throughput":
            cost = score_assignment(room, layout).cost("throughput")
        else:
            problem = room.chain_problem(layout)
            cost = least_by_trying_everything(problem, partial(_total_s, problem), may_return=False)
        best = min(best, (lacks, cost))
    return best


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("seed", range(4))
def test_few_nodes_are_placed_as_brute_force_would(goal: Goal, seed: int) -> None:
    room = random_room(np.random.default_rng(seed), 3, 4, most=3, replicas=1 + seed % 2)
    layout = find_best_assignment(room, goal)
    score = score_assignment(room, layout)
    lacks, cost = _best_of_every_span(room, goal)
    assert score.deficit == lacks
    assert score.cost(goal) == pytest.approx(cost)


@pytest.mark.parametrize("goal", GOALS)
def test_recipes_come_near_the_best_of_all(goal: Goal) -> None:
    """Where all placements can be looked at, and only recipes and local search are used."""
    rng = np.random.default_rng(0)
    ratios, same_lacks = [], 0
    for _ in range(35):
        room = random_room(rng, 6, 8, most=6, replicas=2)
        if count_assignments(room) > MAX_ASSIGNMENTS:
            continue
        best = score_assignment(room, find_best_assignment(room, goal))
        scores = [
            score_assignment(room, improve_assignment(room, apply_recipe(room, recipe), goal))
            for recipe in RECIPES
        ]
        found = scores[0]
        for score in scores[1:]:
            found = score if score.is_better_than(found, goal) else found
        assert found.deficit >= best.deficit
        if found.deficit == best.deficit and np.isfinite(best.cost(goal)):
            same_lacks += 1
            ratios.append(found.cost(goal) / best.cost(goal))
    assert same_lacks >= 20
    assert np.mean(ratios) < 1.05


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("num_nodes", [12, 40])
def test_a_placement_keeps_to_memory_and_leaves_no_gap(goal: Goal, num_nodes: int) -> None:
    world = make_world(num_nodes, 32, np.random.default_rng(num_nodes))
    placement = plan_placement(world.snapshot, _request(world), goal=goal, replicas=2)
    most = {node.peer_id: node.max_blocks for node in world.snapshot.nodes}
    assert all(0 < len(span) <= most[peer] for peer, span in placement.spans.items())
    counts = [
        sum(span.start <= block < span.end for span in placement.spans.values())
        for block in range(32)
    ]
    assert min(counts) >= 2
    assert placement.deficit == CoverageDeficit(0, 0)
    assert 0 <= placement.gap + 1e-9 < 1.0


def test_what_a_placement_predicts_is_what_its_problem_says() -> None:
    world = make_world(20, 32, np.random.default_rng(5))
    placement = plan_placement(world.snapshot, _request(world))
    nodes = tuple(
        replace(
            node,
            span=(span := placement.spans[node.peer_id]),
            decode_tokens_per_s=node.decode_tokens_per_s * len(node.span) / len(span),
        )
        for node in world.snapshot.nodes
    )
    problem = build_problem(replace(world.snapshot, nodes=nodes), _request(world))
    assert sum(len(hop.span) for hop in placement.chain) == 32
    assert placement.latency_s == pytest.approx(solve_latency(problem).cost_s)


def test_a_placement_is_better_than_what_nodes_chose_for_themselves() -> None:
    for seed in range(3):
        world = make_world(30, 32, np.random.default_rng(seed))
        placement = plan_placement(world.snapshot, _request(world))
        now = build_problem(world.snapshot, _request(world))
        assert placement.latency_s <= solve_latency(now).cost_s * 1.001


def test_several_clients_are_served_on_average() -> None:
    world = make_world(30, 32, np.random.default_rng(8))
    requests = [_request(world, client) for client in range(4)]
    together = plan_placement(world.snapshot, requests)
    assert together.bound <= together.latency_s
    for alone in requests:
        layout_for_one = plan_placement(world.snapshot, alone)
        assert layout_for_one.bound <= layout_for_one.latency_s


def test_nodes_that_hold_nothing_yet_get_a_span() -> None:
    nodes = tuple(
        NodeState(PeerId(name), Span(0, 0), decode_tokens_per_s=100.0, max_blocks=3)
        for name in ("a", "b", "c")
    )
    snapshot = Snapshot(ModelId("m"), 6, nodes[:2], 0.0, joining=nodes[2:])
    placement = plan_placement(snapshot, ChainRequest(span=Span(0, 6)), replicas=1)
    assert placement.deficit.holes == 0
    assert len(placement.spans) == 3


def test_what_memory_does_not_allow_is_told_as_lacks() -> None:
    nodes = (NodeState(PeerId("a"), Span(0, 2), decode_tokens_per_s=10.0, max_blocks=2),)
    snapshot = Snapshot(ModelId("m"), 5, nodes, 0.0)
    placement = plan_placement(snapshot, ChainRequest(span=Span(0, 5)), replicas=2)
    assert placement.deficit == CoverageDeficit(3, 8)
    assert placement.chain == ()
    assert placement.latency_s == np.inf
    assert placement.gap == 0.0, "nothing better can be had"


def test_an_empty_swarm_has_an_empty_placement() -> None:
    placement = plan_placement(Snapshot(ModelId("m"), 4, (), 0.0), ChainRequest(span=Span(0, 4)))
    assert dict(placement.spans) == {}
    assert placement.deficit == CoverageDeficit(4, 8)


def test_the_same_snapshot_is_placed_alike() -> None:
    world = make_world(25, 32, np.random.default_rng(9))
    first, second = (plan_placement(world.snapshot, _request(world)) for _ in range(2))
    assert dict(first.spans) == dict(second.spans)


def test_equal_latencies_are_decided_by_throughput() -> None:
    room = random_room(np.random.default_rng(10), 12, 12, most=12, replicas=1)
    _, score, _ = find_assignment(room, "latency")
    scores = [score_assignment(room, apply_recipe(room, recipe)) for recipe in RECIPES]
    assert not any(other.is_better_than(score, "latency") for other in scores)
