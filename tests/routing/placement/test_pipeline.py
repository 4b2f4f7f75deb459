from __future__ import annotations

import itertools

import numpy as np
import pytest

from nesa_node.routing.chain_request import Chain, step_time
from nesa_node.routing.placement import pipeline
from nesa_node.routing.placement import score as bound
from nesa_node.routing.placement.pipeline import cut_pipeline, find_pipeline, quickest_cuts
from nesa_node.routing.placement.placement_problem import Assignment, PlacementProblem
from nesa_node.routing.placement.score import fluid_latency_bound_s, latency_bound_s
from tests.routing.placement.rooms import random_room


def _cost_s(room: PlacementProblem, chain: Chain) -> float:
    """As if every node held everything, once memory has been looked at."""
    for visit in chain:
        assert visit.end - visit.start <= room.max_blocks_N[visit.node]
    assert len({visit.node for visit in chain}) == len(chain)
    zeros_N = np.zeros(room.problem.num_nodes, dtype=np.int64)
    everything = Assignment(zeros_N, zeros_N + room.problem.num_blocks)
    return step_time(room.chain_problem(everything), chain).total_s


def _by_permutations(room: PlacementProblem) -> float:
    best_s = np.inf
    blocks = room.problem.num_blocks
    for count in range(1, min(room.problem.num_nodes, blocks) + 1):
        for nodes in itertools.permutations(range(room.problem.num_nodes), count):
            if room.max_blocks_N[list(nodes)].sum() >= blocks:
                best_s = min(best_s, _cost_s(room, cut_pipeline(room, nodes, quickest_cuts)))
    return best_s


def test_few_nodes_give_the_cheapest_pipeline_of_all() -> None:
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(30):
        room = random_room(rng, 5, 6, most=4)
        chain = find_pipeline(room, np.arange(5))
        best_s = _by_permutations(room)
        if chain is None:
            assert best_s == np.inf
            continue
        found += 1
        assert _cost_s(room, chain) == pytest.approx(best_s)
    assert found > 20


def test_with_many_nodes_it_is_near_the_cheapest(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    ratios = []
    for _ in range(40):
        room = random_room(rng, 9, 16, most=8)
        exact = find_pipeline(room, np.arange(9))
        with monkeypatch.context() as patch:
            patch.setattr(pipeline, "MAX_EXACT_CANDIDATES", 0)
            found = find_pipeline(room, np.arange(9))
        if exact is not None and found is not None:
            ratios.append(_cost_s(room, found) / _cost_s(room, exact))
    assert len(ratios) > 30
    assert min(ratios) >= 1 - 1e-9
    assert np.mean(ratios) < 1.02


@pytest.mark.parametrize("rounds", [0, 30])
def test_the_bound_is_below_the_cheapest(rounds: int) -> None:
    rng = np.random.default_rng(2)
    closeness = []
    for _ in range(60):
        room = random_room(rng, 7, 10, most=6)
        chain = find_pipeline(room, np.arange(7))
        if chain is None:
            assert fluid_latency_bound_s(room) == np.inf or room.max_blocks_N.sum() >= 10
            continue
        cost_s = _cost_s(room, chain)
        # The cost of a chain that is not the best must not make the bound wrong.
        for known_s in (cost_s, 1.3 * cost_s, np.inf):
            least_s = latency_bound_s(room, known_s, rounds=rounds)
            assert 0 < least_s <= cost_s * (1 + 1e-9)
        closeness.append(latency_bound_s(room, cost_s, rounds=rounds) / cost_s)
        assert 0 < fluid_latency_bound_s(room) <= cost_s * (1 + 1e-9)
    assert np.mean(closeness) > (0.8 if rounds else 0.6)


def test_large_swarms_get_a_bound_without_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    room = random_room(np.random.default_rng(3), 40, 12, most=4)
    monkeypatch.setattr(bound, "MAX_WALK_NODES", 10)
    assert latency_bound_s(room) == fluid_latency_bound_s(room)


def test_nodes_that_cannot_hold_the_model_have_no_pipeline() -> None:
    room = random_room(np.random.default_rng(4), 3, 10, most=3)
    assert find_pipeline(room, np.arange(3)) is None
    assert latency_bound_s(room) == np.inf
