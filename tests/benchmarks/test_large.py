from __future__ import annotations

import numpy as np
import pytest

from benchmarks import large
from nesa_node.routing.chains import plan_chain
from nesa_node.routing.search.exact import solve_latency


@pytest.mark.parametrize("seed", range(3))
def test_exact_chain_is_among_the_nodes_that_bounds_leave(seed: int) -> None:
    case = large.make_case(300, seed)
    for client in range(case.world.num_clients):
        whole = solve_latency(large.true_problem(case.world, client, np.arange(300)))
        kept = large.possible_nodes(case, client, whole.cost_s * 1.1)
        assert len(kept) < 300
        pruned = solve_latency(large.true_problem(case.world, client, kept))
        assert pruned.cost_s == pytest.approx(whole.cost_s)


def test_all_nodes_as_candidates_come_near_the_exact_chain() -> None:
    """The rest is what estimated links cost."""
    case = large.make_case(300, 7)
    everyone = np.arange(300)
    for client, request in enumerate(case.requests):
        asked = case.swarm.restrict_request(request, everyone)
        hops = plan_chain(case.swarm.restrict(everyone), asked)
        exact = solve_latency(large.true_problem(case.world, client, everyone))
        assert 1 - 1e-9 <= large.true_step_s(case, client, hops) / exact.cost_s < 1.1


def test_times_of_a_small_swarm_are_measured() -> None:
    row = large.measure(200, seed=0)
    assert {"fit", "prepare", "place_latency", "rebalance"} <= set(row["seconds"])
    assert 0 < row["chain_median_s"] <= row["chain_max_s"]
    assert 0 <= row["latency_gap"] < 1
