from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog

from nesa_node.core.arrays import Floats
from nesa_node.routing.placement.placement_problem import Assignment
from nesa_node.routing.placement.score import flow_bound, solve_max_flow


def _by_linear_program(layout: Assignment, rate_N: Floats, blocks: int) -> float:
    """Maximise x where node i does share[i, b] of block b: sums to x per block, to 1 per node."""
    pairs = [
        (node, block)
        for node in range(len(rate_N))
        for block in range(layout.starts_N[node], layout.ends_N[node])
    ]
    equal = np.zeros((blocks, len(pairs) + 1))
    busy = np.zeros((len(rate_N), len(pairs) + 1))
    for column, (node, block) in enumerate(pairs):
        equal[block, column] = 1.0
        busy[node, column] = 1.0 / rate_N[node]
    equal[:, -1] = -1.0
    gain = np.zeros(len(pairs) + 1)
    gain[-1] = -1.0
    solved = linprog(gain, busy, np.ones(len(rate_N)), equal, np.zeros(blocks))
    assert solved.fun is not None
    return float(-solved.fun)


def _random_layout(rng: np.random.Generator, nodes: int, blocks: int) -> Assignment:
    starts_N = rng.integers(0, blocks, nodes)
    return Assignment(starts_N, np.minimum(starts_N + rng.integers(0, blocks + 1, nodes), blocks))


def test_flow_equals_a_linear_program() -> None:
    rng = np.random.default_rng(0)
    positive = 0
    for _ in range(150):
        nodes, blocks = int(rng.integers(1, 12)), int(rng.integers(1, 12))
        layout, rate_N = _random_layout(rng, nodes, blocks), rng.random(nodes) + 0.05
        expected = _by_linear_program(layout, rate_N, blocks)
        assert solve_max_flow(layout, rate_N, blocks).steps_per_s == pytest.approx(
            expected, abs=1e-7
        )
        positive += expected > 0
    assert positive > 50


def test_the_bottleneck_explains_the_flow() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        layout, rate_N = _random_layout(rng, 10, 8), rng.random(10) + 0.05
        flow = solve_max_flow(layout, rate_N, 8)
        holders = [
            flow.bottleneck_B[layout.starts_N[node] : layout.ends_N[node]].any()
            for node in range(10)
        ]
        ratio = rate_N[holders].sum() / flow.bottleneck_B.sum()
        assert flow.steps_per_s == pytest.approx(ratio, rel=1e-9, abs=1e-12)


def test_no_layout_does_more_than_the_bound() -> None:
    rng = np.random.default_rng(2)
    tight = 0
    for _ in range(200):
        most_N, rate_N = rng.integers(0, 7, 6), rng.random(6) + 0.05
        bound = flow_bound(most_N, rate_N, 6)
        starts_N = np.array([rng.integers(0, 7 - most) for most in most_N])
        flow = solve_max_flow(Assignment(starts_N, starts_N + most_N), rate_N, 6).steps_per_s
        assert flow <= bound * (1 + 1e-9)
        tight += flow >= bound * 0.999 > 0
    assert tight > 20


def test_a_fast_node_with_little_memory_does_not_count_in_full() -> None:
    assert flow_bound(np.array([1, 4]), np.array([100.0, 4.0]), 4) == pytest.approx(4 / 3)


def test_nodes_that_cannot_hold_the_model_do_nothing() -> None:
    assert flow_bound(np.array([2, 1]), np.array([1.0, 1.0]), 4) == 0.0
    assert (
        solve_max_flow(Assignment(np.array([0]), np.array([3])), np.array([1.0]), 4).steps_per_s
        == 0.0
    )
