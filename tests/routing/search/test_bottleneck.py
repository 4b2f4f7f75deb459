from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

from nesa_node.core.errors import MissingBlocksError
from nesa_node.routing.chain_request import Chain, ChainProblem, Visit, check_chain, step_time
from nesa_node.routing.search.exact import bottleneck_s, solve_bottleneck
from tests.routing.problems import least_by_trying_everything, random_problem, small_problem


def _linked_bottleneck_s(problem: ChainProblem, chain: Chain) -> float:
    linked = step_time(problem, chain).total_s < math.inf
    return bottleneck_s(problem, chain) if linked else math.inf


def test_bottleneck_is_as_small_as_exhaustive_search_finds() -> None:
    """500 swarms of up to 6 nodes and 6 blocks."""
    for seed in range(500):
        problem = small_problem(seed)
        cost = partial(_linked_bottleneck_s, problem)
        best = least_by_trying_everything(problem, cost, may_return=False)
        if best == math.inf:
            with pytest.raises(MissingBlocksError):
                solve_bottleneck(problem)
            continue
        found = solve_bottleneck(problem)
        check_chain(problem, found.chain)
        assert len({visit.node for visit in found.chain}) == len(found.chain)
        assert found.seconds == pytest.approx(best, rel=1e-9)
        assert found.seconds == bottleneck_s(problem, found.chain)
        assert found.gap == pytest.approx(0.0, abs=1e-9)


def test_visits_of_one_node_are_summed() -> None:
    problem = random_problem(np.random.default_rng(0), 2, 4)
    problem.visit_s_N[:] = 0.0
    problem.block_s_N[:] = 1.0
    problem.load_N[:] = 0.0
    assert bottleneck_s(problem, (Visit(0, 0, 2), Visit(1, 2, 3), Visit(0, 3, 4))) == 3.0


@pytest.mark.parametrize("seed", range(6))
def test_gap_is_reported_and_bounds_hold_where_the_search_is_cut_short(seed: int) -> None:
    problem = random_problem(np.random.default_rng(seed), 60, 40, longest=20)
    problem.starts_N[0], problem.ends_N[0] = 0, 40
    quick = solve_bottleneck(problem, max_nodes_examined=1)
    slow = solve_bottleneck(problem, max_nodes_examined=200_000)
    assert quick.bound_s <= slow.bound_s * (1 + 1e-9)
    assert slow.bound_s <= slow.seconds <= quick.seconds * (1 + 1e-9)
    assert quick.bound_s <= slow.seconds
    assert slow.gap <= 0.1
