"""Scores of assignments: coverage deficit, latency and throughput.

N nodes, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nesa_node.core.arrays import Floats, Ints
from nesa_node.core.errors import MissingBlocksError
from nesa_node.routing.chains import ChainChooser
from nesa_node.routing.placement.placement_problem import (
    Assignment,
    CoverageDeficit,
    PlacementProblem,
)
from nesa_node.routing.problem import Chain, ChainProblem, step_time
from nesa_node.routing.search.exact import exact_latency

_TOLERANCE = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class MaxFlow:
    """Throughput of the swarm in steps per second, and the blocks that limit it."""

    steps_per_s: float
    bottleneck_B: NDArray[np.bool_]


def solve_max_flow(assignment: Assignment, rate_N: Floats, num_blocks: int) -> MaxFlow:
    """The exact maximum flow, equal to the linear program over all divisions of nodes' time.

    Node i does `rate_N[i]` blocks per second, divided freely among the blocks of its span; every
    block must be done equally often. Queueing and transfers are ignored: they use no compute.

    By duality it is the minimum, over sets U of blocks, of (speed of the nodes that hold any of
    U) / |U|. The complement of U is a set of gaps, and a node holds none of U if its span lies
    inside one gap. So for a guess g a dynamic program over the ends of gaps finds the most violated
    set in O(B^2), and the ratio of that set is the next guess (Dinkelbach's method).
    """
    inside_BB = _speed_inside(assignment, rate_N, num_blocks)
    total = float(inside_BB[0, num_blocks])
    narrow_B = np.ones(num_blocks, dtype=np.bool_)
    guess = total / num_blocks
    while guess > 0:
        slack, candidate_B = _most_violated(inside_BB, guess, num_blocks)
        if slack <= total - guess * num_blocks + _TOLERANCE * total or not candidate_B.any():
            break
        gaps_speed = slack + guess * float((~candidate_B).sum())
        better = max(total - gaps_speed, 0.0) / float(candidate_B.sum())
        if better >= guess * (1 - _TOLERANCE):
            break
        guess, narrow_B = better, candidate_B
        if guess < _TOLERANCE * total:
            guess = 0.0
    return MaxFlow(guess, narrow_B)


def flow_bound(max_blocks_N: Ints, rate_N: Floats, num_blocks: int) -> float:
    """Upper bound in steps per second for all placements.

    A node does at most `rate_N` blocks per second, and each of its `max_blocks_N` blocks no more
    often than the swarm does. So the bound is the greatest x with sum of min(rate, most * x) >= B *
    x.
    """
    usable = (max_blocks_N > 0) & (rate_N > 0)
    max_blocks_N, rate_N = max_blocks_N[usable].astype(np.float64), rate_N[usable]
    if max_blocks_N.sum() < num_blocks:
        return 0.0
    limit = float(rate_N.sum()) / num_blocks
    while True:
        small = rate_N <= max_blocks_N * limit
        spread = num_blocks - float(max_blocks_N[~small].sum())
        if spread <= 0:
            return limit
        better = float(rate_N[small].sum()) / spread
        if better >= limit * (1 - _TOLERANCE):
            return limit
        limit = better


def _speed_inside(assignment: Assignment, rate_N: Floats, num_blocks: int) -> Floats:
    """The total speed [s, e] of the nodes with a span within `s:e`."""
    size = num_blocks + 1
    by_span = np.zeros((size, size))
    holds = assignment.ends_N > assignment.starts_N
    np.add.at(by_span, (assignment.starts_N[holds], assignment.ends_N[holds]), rate_N[holds])
    later_starts = np.cumsum(by_span[::-1], axis=0)[::-1]
    return np.cumsum(later_starts, axis=1)


def _most_violated(
    inside_BB: Floats, guess: float, num_blocks: int
) -> tuple[float, NDArray[np.bool_]]:
    """The largest sum over gaps of (speed inside - guess * length), and the blocks outside them."""
    best = np.zeros(num_blocks + 1)
    gap_start = np.full(num_blocks + 1, -1)
    lengths = np.arange(num_blocks + 1)
    for end in range(1, num_blocks + 1):
        gains = best[:end] + inside_BB[:end, end] - guess * (end - lengths[:end])
        start = int(np.argmax(gains))
        best[end], gap_start[end] = best[end - 1], -1
        if gains[start] > best[end]:
            best[end], gap_start[end] = gains[start], start
    kept = np.ones(num_blocks, dtype=np.bool_)
    end = num_blocks
    while end > 0:
        start = int(gap_start[end])
        if start < 0:
            end -= 1
        else:
            kept[start:end] = False
            end = start
    return float(best[num_blocks]), kept


Goal = Literal["latency", "throughput"]

LARGE_SWARM_NODES = 1000
COST_TOLERANCE = 0.01
"""Relative difference of costs below which the other goal decides: estimates are that uncertain."""


@dataclass(frozen=True, slots=True)
class PlacementScore:
    """Coverage deficit, latency and throughput of an assignment.

    `latency_s`: step time of the best chain, the mean over clients; inf without a chain.
    """

    deficit: CoverageDeficit
    latency_s: float
    steps_per_s: float

    def cost(self, goal: Goal) -> float:
        """Seconds per step: the latency, or the inverse of the throughput."""
        if goal == "latency":
            return self.latency_s
        return 1.0 / self.steps_per_s if self.steps_per_s > 0 else np.inf

    def is_better_than(self, other: PlacementScore, goal: Goal) -> bool:
        """Whether this is better: fewer holes, then fewer missing replicas, then the goal."""
        if self.deficit != other.deficit:
            return self.deficit < other.deficit
        mine, theirs = self.cost(goal), other.cost(goal)
        if mine < theirs * (1 - COST_TOLERANCE) or theirs < mine * (1 - COST_TOLERANCE):
            return mine < theirs
        side: Goal = "throughput" if goal == "latency" else "latency"
        return (self.cost(side), mine) < (other.cost(side), theirs)


def score_assignment(instance: PlacementProblem, assignment: Assignment) -> PlacementScore:
    flow = solve_max_flow(assignment, instance.blocks_per_s_N, instance.problem.num_blocks)
    latencies_s = [
        best_chain_latency_s(instance.chain_problem(assignment, client))
        for client in range(len(instance.client_problems))
    ]
    return PlacementScore(
        assignment.deficit(instance), float(np.mean(latencies_s)), flow.steps_per_s
    )


def best_chain_latency_s(problem: ChainProblem) -> float:
    """Step time of the best chain in seconds; inf if there is none."""
    chain = best_chain(problem)
    return step_time(problem, chain).total_s if chain is not None else np.inf


def best_chain(problem: ChainProblem, choose: ChainChooser = exact_latency) -> Chain | None:
    """The chain that `choose` finds, by default the fastest; None if there is none."""
    try:
        return choose(problem)
    except MissingBlocksError:
        return None
