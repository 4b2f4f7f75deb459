"""Problems made up for tests, and what exhaustive search says of them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import numpy as np

from nesa_node.core.ids import PeerId
from nesa_node.routing.chain_request import Chain, ChainProblem, Visit


def count_calls(call: Callable[[], object]) -> int:
    """How many functions, Python's and C's, the call runs: its work, whatever the machine."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(before)
    return calls


def random_problem(
    rng: np.random.Generator, num_nodes: int, num_blocks: int, *, longest: int | None = None
) -> ChainProblem:
    """Nodes in a plane, a hundredfold apart in speed, transfers that break the triangle."""
    starts_N = rng.integers(0, num_blocks, num_nodes)
    longest = longest or num_blocks
    lengths_N = rng.integers(1, longest + 1, num_nodes)
    places_N2 = rng.random((num_nodes, 2))
    transfer_s_NN = 0.05 * np.linalg.norm(places_N2[:, None] - places_N2[None], axis=2)
    transfer_s_NN *= rng.uniform(0.5, 2.0, (num_nodes, num_nodes))
    np.fill_diagonal(transfer_s_NN, 0.0)
    return ChainProblem(
        peers=tuple(PeerId(f"p{index:04}") for index in range(num_nodes)),
        num_blocks=num_blocks,
        starts_N=starts_N,
        ends_N=np.minimum(starts_N + lengths_N, num_blocks),
        block_s_N=rng.choice([1e-4, 1e-3, 1e-2, 5e-2], num_nodes)
        * rng.uniform(0.5, 1.5, num_nodes),
        visit_s_N=rng.choice([0.0, 1e-3, 2e-2], num_nodes),
        load_N=rng.choice([0.0, 0.3, 0.9, 1.5], num_nodes),
        spare_N=rng.random(num_nodes),
        cache_N=np.ones(num_nodes),
        pressure_N=np.zeros(num_nodes),
        reliability_N=rng.uniform(0.8, 1.0, num_nodes),
        stability_N=rng.uniform(0.8, 1.0, num_nodes),
        entry_s_N=rng.uniform(0.0, 0.05, num_nodes),
        exit_s_N=rng.uniform(0.0, 0.05, num_nodes),
        transfer_s_NN=transfer_s_NN,
    )


def small_problem(seed: int) -> ChainProblem:
    """Up to 6 nodes and 6 blocks, covered or not, some near each other, some links cut."""
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, int(rng.integers(1, 7)), int(rng.integers(1, 7)))
    if rng.random() < 0.5:
        # A slow node around fast ones, where a path returns.
        problem.starts_N[0], problem.ends_N[0] = 0, problem.num_blocks
        problem.block_s_N[0] = 0.1
        problem.visit_s_N[:] *= 0.01
        problem.transfer_s_NN[:] *= 0.01
    if rng.random() < 0.3:
        problem.transfer_s_NN[rng.random(problem.transfer_s_NN.shape) < 0.3] = np.inf
    return problem


def least_by_trying_everything(
    problem: ChainProblem, cost: Callable[[Chain], float], *, may_return: bool
) -> float:
    """The least `cost` of any chain; infinite if there is none."""
    best = math.inf

    def extend(chain: Chain) -> None:
        nonlocal best
        at = chain[-1].end if chain else 0
        if at == problem.num_blocks:
            best = min(best, cost(chain))
            return
        for node in range(problem.num_nodes):
            if any(visit.node == node for visit in (chain[-1:] if may_return else chain)):
                continue
            if not problem.starts_N[node] <= at < problem.ends_N[node]:
                continue
            for end in range(at + 1, int(problem.ends_N[node]) + 1):
                extend((*chain, Visit(node, at, end)))

    extend(())
    return best


def covered_problem(rng: np.random.Generator, num_nodes: int, num_blocks: int) -> ChainProblem:
    """The first node holds everything, slowly; the others up to half."""
    problem = random_problem(rng, num_nodes, num_blocks, longest=max(1, num_blocks // 2))
    problem.starts_N[0], problem.ends_N[0] = 0, num_blocks
    problem.block_s_N[0] = 0.05
    return problem
