"""Maximum throughput of a swarm, and the throughput that a strategy reaches.

N nodes, B blocks, K pairs of a block and a node that holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from nesa_node.routing.chain_request import Chain, ChainProblem
from nesa_node.routing.search.minplus import holder_mask

_MIN_SPARE_LOAD = 1e-6


def max_tokens_per_s(problem: ChainProblem) -> float:
    """The largest flow of tokens that overloads no node.

    A linear program: x_bi tokens per second run block b on node i, equally many for every block;
    node i has 1 - load of its time. Fixed costs of visits are ignored and revisits allowed, so that
    it is an upper bound for all chains. Raises `MissingBlocksError` if some block has no holder.
    """
    # scipy's optimisers take half a second to import.
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    block_K, node_K = np.nonzero(holder_mask(problem))
    pairs = len(block_K)
    nodes, blocks = problem.num_nodes, problem.num_blocks
    if blocks == 0:
        raise ValueError("a flow through no blocks has no limit")
    # The last variable is the flow; times are divided by their median, for the solver's tolerances.
    unit_s = float(np.median(problem.block_s_N)) or 1.0
    busy: Any = csr_array(
        (problem.block_s_N[node_K] / unit_s, (node_K, np.arange(pairs))), shape=(nodes, pairs + 1)
    )
    same: Any = csr_array(
        (
            np.concatenate((np.ones(pairs), np.full(blocks, -1.0))),
            (
                np.concatenate((block_K, np.arange(blocks))),
                np.concatenate((np.arange(pairs), np.full(blocks, pairs))),
            ),
        ),
        shape=(blocks, pairs + 1),
    )
    cost = np.zeros(pairs + 1)
    cost[-1] = -1.0
    room_N = np.maximum(1.0 - problem.load_N, 0.0)
    bounds_N, zeros_B = room_N.tolist(), np.zeros(blocks).tolist()
    solved = linprog(cost, A_ub=busy, b_ub=bounds_N, A_eq=same, b_eq=zeros_B)
    if solved.fun is None:
        raise RuntimeError(f"the linear program has no answer: {solved.message}")
    return float(-solved.fun) / unit_s


def saturate(
    problem: ChainProblem, choose: Callable[[ChainProblem], Chain], *, step: float = 0.1
) -> float:
    """Tokens per second that a swarm reaches with sessions that open one after another.

    `choose` routes each at the loads caused by those before it. A session brings the tokens per
    second that raise the load of some node by `step`, or to 1 if less is free. It ends when a chain
    contains a saturated node.
    """
    total_tokens_per_s = 0.0
    load_N = problem.load_N.copy()
    while True:
        chain = choose(replace(problem, load_N=load_N))
        busy_s_N = np.zeros(problem.num_nodes)
        for visit in chain:
            busy_s_N[visit.node] += (visit.end - visit.start) * problem.block_s_N[visit.node]
        used = np.flatnonzero(busy_s_N)
        left = 1.0 - load_N[used]
        if (left <= _MIN_SPARE_LOAD).any():
            return total_tokens_per_s
        tokens_per_s = float((np.minimum(left, step) / busy_s_N[used]).min())
        load_N = load_N + tokens_per_s * busy_s_N
        total_tokens_per_s += tokens_per_s
