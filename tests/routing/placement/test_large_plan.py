"""Placements by candidates, against the planner that sees all pairs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nesa_node.core.ids import Span
from nesa_node.routing.chain_request import ChainRequest
from nesa_node.routing.large_swarm import LargeSwarm, prepare_large_swarm
from nesa_node.routing.placement.large_plan import (
    choose_plan_candidates,
    measure_large_swarm,
    plan_large_placement,
    rebalance_large,
)
from nesa_node.routing.placement.placement_problem import (
    Assignment,
    FixedHolders,
    PlacementProblem,
    make_placement_problem,
)
from nesa_node.routing.placement.plan import WhatIfSettings, plan_placement, with_spans
from nesa_node.routing.placement.recipes import RECIPES, apply_recipe
from nesa_node.routing.placement.score import Goal, score_assignment
from nesa_node.topology.geography import locations_array
from nesa_node.topology.links.sparse import estimate_sparse_links
from nesa_node.topology.simulation.world import make_large_world
from nesa_node.topology.snapshot import count_span_holders
from tests.routing.placement.rooms import random_room

BLOCKS = 40
WHOLE = ChainRequest(span=Span(0, BLOCKS))
WORLD = make_large_world(400, BLOCKS, 1, num_clients=2)
LINKS = estimate_sparse_links(
    [node.peer_id for node in WORLD.snapshot.nodes],
    locations_array([node.location for node in WORLD.snapshot.nodes]),
    WORLD.measured,
    np.random.default_rng(0),
)
SWARM = prepare_large_swarm(WORLD.snapshot, LINKS, WHOLE)
REQUESTS = [
    replace(WHOLE, entry_rtt_ms=LINKS.expect_from(rows, rtt_ms_N[rows]))
    for rows, rtt_ms_N in zip(WORLD.client_pings_CA, WORLD.client_rtt_ms_CN, strict=True)
]
EVERYTHING = np.arange(400)
DENSE = SWARM.restrict(EVERYTHING)
DENSE_REQUESTS = [SWARM.restrict_request(request, EVERYTHING) for request in REQUESTS]


def _split(
    room: PlacementProblem, assignment: Assignment, kept: int
) -> tuple[PlacementProblem, Assignment]:
    """The problem of the first `kept` nodes, the others as fixed holders."""
    blocks = room.problem.num_blocks
    rest = Assignment(assignment.starts_N[kept:], assignment.ends_N[kept:])
    speed_SE = np.zeros((blocks + 1, blocks + 1))
    np.add.at(speed_SE, (rest.starts_N, rest.ends_N), room.blocks_per_s_N[kept:])
    inside_DB = room.domains_DN[:, kept:].astype(np.int64) @ rest.holds_NB(blocks).astype(np.int64)
    problem = room.problem
    fields = {
        name: getattr(problem, name)[:kept]
        for name in problem.__dataclass_fields__
        if name.endswith("_N") or name == "peers"
    }
    part = replace(problem, **fields, transfer_s_NN=problem.transfer_s_NN[:kept, :kept])
    split = PlacementProblem(
        part,
        room.max_blocks_N[:kept],
        room.replicas,
        domains_DN=room.domains_DN[:, :kept],
        fixed=FixedHolders(rest.count_holders_B(blocks), inside_DB, speed_SE),
    )
    return split, Assignment(assignment.starts_N[:kept], assignment.ends_N[:kept])


def test_fixed_holders_count_as_the_nodes_that_they_are() -> None:
    rng = np.random.default_rng(0)
    seen = set[int]()
    for _ in range(30):
        room = random_room(rng, 9, 12, most=7, replicas=2)
        room = replace(room, domains_DN=rng.random((3, 9)) < 0.6)
        free_N = room.problem.num_blocks - room.max_blocks_N
        assignment = room.assign_full_spans(rng.integers(0, free_N + 1))
        split, part = _split(room, assignment, 4)
        whole_score, part_score = (
            score_assignment(*each) for each in ((room, assignment), (split, part))
        )
        assert part_score.deficit == whole_score.deficit
        assert part_score.exposed == whole_score.exposed
        assert part_score.steps_per_s == pytest.approx(whole_score.steps_per_s)
        seen.add(whole_score.exposed)
    assert len(seen) > 3


def test_recipes_fill_what_fixed_holders_lack() -> None:
    rng = np.random.default_rng(1)
    room = random_room(rng, 9, 12, most=7, replicas=1)
    rest = np.array([0] * 4 + [6] * 5)
    held = Assignment(rest, rest + np.array([1] * 4 + [6] * 5))
    split, _ = _split(room, held, 4)
    split = replace(split, max_blocks_N=np.array([6, 3, 2, 1]))
    fill = next(recipe for recipe in RECIPES if recipe.name == "fill")
    assert apply_recipe(split, fill).starts_N[0] == 0


@pytest.mark.parametrize("goal", ["latency", "throughput"])
def test_plan_of_candidates_is_nearly_that_of_all_pairs(goal: Goal) -> None:
    large = plan_large_placement(SWARM, REQUESTS, goal=goal)
    dense = plan_placement(DENSE, DENSE_REQUESTS, goal=goal)
    assert set(large.spans) == {node.peer_id for node in DENSE.nodes}
    holders = count_span_holders(((span.start, span.end) for span in large.spans.values()), BLOCKS)
    assert min(holders) >= 2
    assert large.deficit.replicas == 0
    instance = make_placement_problem(with_spans(DENSE, large.spans), DENSE_REQUESTS, replicas=2)
    score = score_assignment(instance, instance.current_assignment())
    assert score.steps_per_s == pytest.approx(large.steps_per_s, rel=1e-6)
    assert score.latency_s <= large.latency_s * (1 + 1e-9)
    if goal == "latency":
        assert score.latency_s <= dense.latency_s * 1.03
        assert large.bound <= dense.latency_s
    else:
        assert large.steps_per_s >= dense.steps_per_s * 0.97


def test_every_branch_that_holds_the_model_serves_its_region() -> None:
    plan = plan_large_placement(
        SWARM, REQUESTS, candidates=choose_plan_candidates(SWARM, REQUESTS, 20)
    )
    for branch in range(int(SWARM.branch_N.max()) + 1):
        rows = np.flatnonzero(SWARM.branch_N == branch)
        room = sum(WORLD.snapshot.nodes[row].max_blocks for row in rows)
        spans = [plan.spans[WORLD.snapshot.nodes[row].peer_id] for row in rows.tolist()]
        if room > 6 * BLOCKS:
            assert min(count_span_holders(((s.start, s.end) for s in spans), BLOCKS)) >= 1


def _with_hole(swarm: LargeSwarm) -> LargeSwarm:
    """No node holds the last block any more."""
    spans = {
        node.peer_id: Span(node.span.start, min(node.span.end, BLOCKS - 1))
        for node in swarm.snapshot.nodes
    }
    return swarm.with_spans(spans, WHOLE)


def test_a_hole_is_repaired_by_candidates() -> None:
    holed = _with_hole(SWARM)
    plan = rebalance_large(holed, REQUESTS)
    assert plan.trigger == "hole"
    assert plan.after.deficit.holes == 0
    mended = holed.with_spans({move.peer_id: move.after for move in plan.moves}, WHOLE)
    question = WhatIfSettings(requests=REQUESTS)
    assert measure_large_swarm(holed, question).deficit.holes == 1
    found = measure_large_swarm(mended, question)
    assert found.deficit.holes == 0
    assert np.isfinite(found.latency_s)
    assert found.coverage[-1] == sum(move.after.end == BLOCKS for move in plan.moves)


def test_measured_performance_is_that_of_all_nodes() -> None:
    found = measure_large_swarm(SWARM, WhatIfSettings(requests=REQUESTS))
    instance = make_placement_problem(DENSE, DENSE_REQUESTS, replicas=2)
    score = score_assignment(instance, instance.current_assignment())
    assert found.latency_s == pytest.approx(score.latency_s, rel=0.005)
    assert found.steps_per_s == pytest.approx(score.steps_per_s)
    assert found.deficit == score.deficit
