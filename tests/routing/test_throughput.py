from __future__ import annotations

import numpy as np
import pytest

from benchmarks.saturation import max_tokens_per_s, saturate
from nesa_node.core.errors import MissingBlocksError
from nesa_node.routing.search.exact import exact_latency
from nesa_node.routing.strategies import exact_throughput, marginal_price_factor
from tests.routing.problems import covered_problem, random_problem


def test_prices_rise_with_the_load_and_stay_finite() -> None:
    factor = marginal_price_factor(np.array([0.0, 0.5, 0.98, 1.0, 1.5, 1e9]))
    assert factor[:2] == pytest.approx([1.0, 4.0])
    assert (np.diff(factor) > 0).all()
    assert np.isfinite(factor).all()


def test_bound_is_what_few_nodes_can_do_by_hand() -> None:
    problem = random_problem(np.random.default_rng(0), 3, 4)
    problem.starts_N[:], problem.ends_N[:] = [0, 0, 2], [4, 2, 4]
    problem.block_s_N[:], problem.load_N[:] = 0.1, [0.0, 0.0, 0.5]
    # Two nodes run blocks 2 and 3: 1.5 of their time over 2 x 0.1 s, if the first does little else.
    assert max_tokens_per_s(problem) == pytest.approx((1.0 + 1.0 + 0.5) / 0.4)
    problem.load_N[:] = [1.5, 0.0, 0.0]
    assert max_tokens_per_s(problem) == pytest.approx(5.0)


def test_marginal_prices_fill_a_swarm_far_better_than_least_latency() -> None:
    by_price, by_latency = [], []
    for seed in range(6):
        problem = covered_problem(np.random.default_rng(seed), 40, 20)
        problem.load_N[:] = 0.3 * np.random.default_rng(seed).random(40)
        bound = max_tokens_per_s(problem)
        by_price.append(saturate(problem, exact_throughput) / bound)
        by_latency.append(saturate(problem, exact_latency) / bound)
    assert max(by_price) <= 1.0 + 1e-6
    assert np.mean(by_price) >= 0.8
    assert np.mean(by_price) > np.mean(by_latency) + 0.1


def test_bound_needs_every_block() -> None:
    with pytest.raises(MissingBlocksError):
        max_tokens_per_s(random_problem(np.random.default_rng(0), 0, 3))
