"""Scores of assignments (coverage deficit, latency, throughput), and lower bounds on the latency.

With free spans node i may run up to `most_N[i]` consecutive blocks. Finding the best such chain
combines the knapsack and the travelling salesman problem. A dynamic program over (blocks done, last
node) that allows revisits gives a lower bound.

N nodes, B blocks, S senders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nesa_node.core.arrays import Floats, Ints
from nesa_node.core.errors import MissingBlocksError
from nesa_node.routing.chain_request import Chain, ChainProblem, step_time
from nesa_node.routing.chains import ChainChooser
from nesa_node.routing.placement.placement_problem import (
    Assignment,
    CoverageDeficit,
    PlacementProblem,
)
from nesa_node.routing.search.exact import exact_latency
from nesa_node.routing.search.minplus import nearest_transfer_s

_TOLERANCE = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class MaxFlow:
    """Throughput of the swarm in steps per second, and the blocks that limit it."""

    steps_per_s: float
    bottleneck_B: NDArray[np.bool_]


def solve_max_flow(
    assignment: Assignment, rate_N: Floats, num_blocks: int, fixed_SE: Floats | None = None
) -> MaxFlow:
    """The exact maximum flow, equal to the linear program over all divisions of nodes' time.

    Node i does `rate_N[i]` blocks per second, divided freely among the blocks of its span; every
    block must be done equally often. Queueing and transfers are ignored: they use no compute.

    By duality it is the minimum, over sets U of blocks, of (speed of the nodes that hold any of
    U) / |U|. The complement of U is a set of gaps, and a node holds none of U if its span lies
    inside one gap. So for a guess g a dynamic program over the ends of gaps finds the most violated
    set in O(B^2), and the ratio of that set is the next guess (Dinkelbach's method).

    `fixed_SE`: `FixedHolders.speed_SE`, the speed of further nodes.
    """
    inside_BB = _speed_inside(assignment, rate_N, num_blocks, fixed_SE)
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


def _speed_inside(
    assignment: Assignment, rate_N: Floats, num_blocks: int, fixed_SE: Floats | None
) -> Floats:
    """The total speed [s, e] of the nodes with a span within `s:e`."""
    size = num_blocks + 1
    by_span = np.zeros((size, size)) if fixed_SE is None else fixed_SE.copy()
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

    `latency_s`: step time of the best chain, the mean over clients; inf without a chain. `exposed`:
    pairs of a block and a failure domain that contains all of its holders.
    """

    deficit: CoverageDeficit
    latency_s: float
    steps_per_s: float
    exposed: int = 0

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
    flow = solve_max_flow(
        assignment,
        instance.blocks_per_s_N,
        instance.problem.num_blocks,
        instance.others.speed_SE,
    )
    latencies_s = [
        best_chain_latency_s(instance.chain_problem(assignment, client))
        for client in range(len(instance.client_problems))
    ]
    return PlacementScore(
        assignment.deficit(instance),
        float(np.mean(latencies_s)),
        flow.steps_per_s,
        assignment.count_exposed(instance),
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


_ROUNDING_SLACK = 1.0 + 1e-9
_ROWS_AT_ONCE = 64


MAX_SUBGRADIENT_ROUNDS = 30
MAX_ROUNDS_TIMES_NODES = 6000
MAX_WALK_NODES = 2000
"""Nodes up to which the dynamic program runs; above it takes seconds, and `fluid_latency_bound_s`
is used."""


@dataclass(frozen=True, slots=True)
class _RelaxedWalk:
    """The cheapest way to run all blocks with revisits allowed, and the nodes it visits."""

    cost_s: float
    nodes: tuple[int, ...]


def latency_bound_s(
    instance: PlacementProblem, upper_bound_s: float = np.inf, *, rounds: int | None = None
) -> float:
    """Lower bound in seconds on the latency of any placement; inf if no chain is possible.

    `upper_bound_s`: cost of a known chain, which caps the result. The cheapest relaxed walk
    alternates between the fastest nodes. So each visit is charged, and the sum of charges is
    subtracted again (Lagrange multipliers of "at most one visit"); `rounds` subgradient steps raise
    the charges of nodes that a walk visits twice [default: fewer rounds for larger swarms].
    """
    problem = instance.problem
    if int(instance.max_blocks_N.sum()) < problem.num_blocks:
        return np.inf
    if problem.num_nodes > MAX_WALK_NODES:
        return min(fluid_latency_bound_s(instance), upper_bound_s)
    if rounds is None:
        rounds = min(MAX_SUBGRADIENT_ROUNDS, MAX_ROUNDS_TIMES_NODES // max(problem.num_nodes, 1))
    nearest_s_N = nearest_transfer_s(problem.transfer_s_NN)
    charge_s_N = np.zeros(problem.num_nodes)
    best_s = 0.0
    pace = 1.0
    for _ in range(rounds + 1):
        visit_s_N = problem.visit_s_N + charge_s_N
        total_s = float(charge_s_N.sum())
        walk = _cheapest_walk(instance, visit_s_N, nearest_s_N, upper_bound_s + total_s)
        if walk is None:
            return upper_bound_s
        bound_s = walk.cost_s - total_s
        excess_N = np.bincount(walk.nodes, minlength=problem.num_nodes) - 1.0
        if bound_s > best_s:
            best_s = bound_s
        else:
            pace *= 0.8
        if excess_N.max() <= 0 and not charge_s_N.any():
            break
        # Nodes neither visited nor charged do not count in the length of the subgradient.
        excess_N[(excess_N < 0) & (charge_s_N == 0)] = 0.0
        length = float((excess_N**2).sum())
        if length == 0:
            break
        target_s = upper_bound_s if np.isfinite(upper_bound_s) else 1.5 * best_s
        step = pace * max(target_s - bound_s, 1e-3 * target_s) / length
        charge_s_N = np.maximum(charge_s_N + step * excess_N, 0.0)
    return min(best_s, upper_bound_s)


def fluid_latency_bound_s(instance: PlacementProblem) -> float:
    """A lower bound in closed form: each node sends to its nearest node, and nodes may be split.

    A node is cheapest per block when it runs all the blocks that fit, which share its fixed costs.
    The blocks go to the cheapest nodes, as many as fit on each.
    """
    problem = instance.problem
    held = instance.max_blocks_N > 0
    most_N = instance.max_blocks_N[held]
    if int(most_N.sum()) < problem.num_blocks:
        return np.inf
    onward_s_N = np.minimum(nearest_transfer_s(problem.transfer_s_NN), problem.exit_s_N)[held]
    fixed_s_N = problem.visit_s_N[held] + onward_s_N
    per_block_s_N = problem.busy_block_s_N[held] + fixed_s_N / most_N
    cheapest = np.argsort(per_block_s_N, kind="stable")
    filled = np.minimum(np.cumsum(most_N[cheapest]), problem.num_blocks)
    lengths = np.diff(filled, prepend=0)
    ends_s = problem.entry_s_N[held].min() + (problem.exit_s_N[held] - onward_s_N).min()
    return float(ends_s + (lengths * per_block_s_N[cheapest]).sum())


def _cheapest_walk(
    instance: PlacementProblem, visit_s_N: Floats, nearest_s_N: Floats, limit_s: float
) -> _RelaxedWalk | None:
    """The cheapest relaxed walk; None if there is none of at most `limit_s`."""
    problem, most_N = instance.problem, instance.max_blocks_N
    blocks, nodes = problem.num_blocks, problem.num_nodes
    least_s_B = _remaining_bound_s(instance, visit_s_N, nearest_s_N)
    limit_s *= _ROUNDING_SLACK
    done_s_BN = np.full((blocks + 1, nodes), np.inf)
    since_BN = np.zeros((blocks + 1, nodes), dtype=np.int64)
    for block in range(blocks):
        if block == 0:
            reached_s_N = problem.entry_s_N
        else:
            leaving_s_N = done_s_BN[block] + nearest_s_N
            senders = np.flatnonzero(leaving_s_N + least_s_B[blocks - block] <= limit_s)
            if not len(senders):
                continue
            reached_s_N = _arrival_s(problem, senders, done_s_BN[block, senders])
        able = np.flatnonzero(reached_s_N + least_s_B[blocks - block] <= limit_s)
        entered_s_K = reached_s_N[able] + visit_s_N[able]
        block_s_K, most_K = problem.busy_block_s_N[able], most_N[able]
        counts_C1 = np.arange(1, min(blocks - block, int(most_K.max(initial=0))) + 1)[:, None]
        cost_s_CK = entered_s_K + counts_C1 * block_s_K
        cost_s_CK[counts_C1 > most_K] = np.inf
        here = slice(block + 1, block + 1 + len(counts_C1))
        more, who = np.nonzero(cost_s_CK < done_s_BN[here, able])
        done_s_BN[here][more, able[who]] = cost_s_CK[more, who]
        since_BN[here][more, able[who]] = block
    total_s_N = done_s_BN[blocks] + problem.exit_s_N
    last = int(total_s_N.argmin())
    if not total_s_N[last] <= limit_s or total_s_N[last] == np.inf:
        return None
    return _RelaxedWalk(float(total_s_N[last]), _trace(problem, done_s_BN, since_BN, last))


def _trace(problem: ChainProblem, done_s_BN: Floats, since_BN: Ints, last: int) -> tuple[int, ...]:
    nodes = [last]
    block = int(since_BN[problem.num_blocks, last])
    while block > 0:
        arrived_s_N = done_s_BN[block] + problem.transfer_s_NN[:, nodes[-1]]
        arrived_s_N[nodes[-1]] = np.inf
        nodes.append(int(arrived_s_N.argmin()))
        block = int(since_BN[block, nodes[-1]])
    return tuple(nodes)


def _remaining_bound_s(
    instance: PlacementProblem, visit_s_N: Floats, nearest_s_N: Floats
) -> Floats:
    """Lower bound [r] on the cost of r blocks from entering a node on, without the transfer to it.

    Every node sends to its nearest node.
    """
    problem, most_N = instance.problem, instance.max_blocks_N
    middle_s_B = np.full(problem.num_blocks + 1, np.inf)
    last_s_B = middle_s_B.copy()
    counts_C1 = np.arange(1, int(most_N.max(initial=0)) + 1)[:, None]
    run_s_CN = visit_s_N + counts_C1 * problem.busy_block_s_N
    run_s_CN[counts_C1 > most_N] = np.inf
    middle_s_B[1 : len(counts_C1) + 1] = (run_s_CN + nearest_s_N).min(axis=1, initial=np.inf)
    last_s_B[1 : len(counts_C1) + 1] = (run_s_CN + problem.exit_s_N).min(axis=1, initial=np.inf)
    least_s_B = np.full(problem.num_blocks + 1, np.inf)
    least_s_B[0] = 0.0
    for left in range(1, problem.num_blocks + 1):
        onward_s = middle_s_B[1:left] + least_s_B[left - 1 : 0 : -1]
        least_s_B[left] = min(float(last_s_B[left]), float(onward_s.min(initial=np.inf)))
    return least_s_B


def _arrival_s(problem: ChainProblem, senders: Ints, done_s_S: Floats) -> Floats:
    """Least cost of arriving at each node from any of `senders` but itself, [N]."""
    reached_s_N = np.full(problem.num_nodes, np.inf)
    for start in range(0, len(senders), _ROWS_AT_ONCE):
        rows = senders[start : start + _ROWS_AT_ONCE]
        sums_s_SN = problem.transfer_s_NN[rows] + done_s_S[start : start + _ROWS_AT_ONCE, None]
        sums_s_SN[np.arange(len(rows)), rows] = np.inf
        np.minimum(reached_s_N, sums_s_SN.min(axis=0), out=reached_s_N)
    return reached_s_N
