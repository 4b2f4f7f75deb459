"""The chain with the smallest bottleneck: it has the highest throughput as a full pipeline.

N nodes, B blocks. A node's *seconds per token* are the sum over all its visits and blocks; the
bottleneck is the largest of any node in the chain. A dynamic program over (block, node) that loses
this sum when a path revisits a node would come out below the true optimum. Therefore chains here
visit no node twice, as in live sessions, and bounds allow revisits but count a node's blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import partial

import numpy as np

from nesa_node.routing.exact import exact_latency
from nesa_node.routing.problem import Chain, Floats, Problem
from nesa_node.routing.within import SLACK, Within

EFFORT = 200_000
"""Nodes examined per threshold. Swarms of up to about twenty nodes need fewer."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """A chain, the seconds per token of its slowest node, and a lower bound for all chains."""

    chain: Chain
    seconds: float
    bound_s: float

    @property
    def gap(self) -> float:
        """Relative excess over the bound; 0 if the chain is proven optimal."""
        return self.seconds / self.bound_s - 1.0 if self.bound_s > 0.0 else 0.0


def bottleneck_s(problem: Problem, chain: Chain) -> float:
    """Seconds per token of the slowest node in `chain`, all its visits summed."""
    busy_s: dict[int, float] = {}
    for visit in chain:
        seconds = float(problem.visit_s_N[visit.node])
        seconds += (visit.end - visit.start) * float(problem.busy_block_s_N[visit.node])
        busy_s[visit.node] = busy_s.get(visit.node, 0.0) + seconds
    return max(busy_s.values(), default=0.0)


def bottleneck(problem: Problem, *, effort: int = EFFORT) -> Bottleneck:
    """The chain with the smallest bottleneck; the fastest chain if it is one of them.

    A threshold on the bottleneck limits the blocks that each node may run; a search decides whether
    a chain exists within it. The candidate thresholds (blocks times seconds of some node) are
    bisected between a relaxation and the bottleneck of the fastest chain. If `effort` (nodes
    examined per threshold) runs out, the threshold counts as infeasible for the chain but not for
    the bound, and `gap` is positive. Raises as `exact_latency` does.
    """
    if problem.num_blocks == 0:
        return Bottleneck((), 0.0, 0.0)
    best = exact_latency(problem)
    thresholds_s = _thresholds(problem)
    place = partial(np.searchsorted, thresholds_s)
    high = int(place(bottleneck_s(problem, best) / SLACK))
    at = low = bound = bisect_left(
        range(high), True, key=lambda at: Within(problem, float(thresholds_s[at])).may_exist()
    )
    while low < high:
        within = Within(problem, float(thresholds_s[at]))
        chain = within.find(max(1, effort // problem.num_nodes))
        if chain is not None:
            best, high = chain, min(at, int(place(bottleneck_s(problem, chain) / SLACK)))
        else:
            low = at + 1
            if within.proven:
                bound = low
        # The threshold of the relaxation is tried first: it is nearly always feasible.
        at = (low + high) // 2
    seconds = bottleneck_s(problem, best)
    return Bottleneck(best, seconds, min(seconds, float(thresholds_s[min(bound, high)])))


def _thresholds(problem: Problem) -> Floats:
    """Every value that a node's seconds per token can have in one visit, ascending."""
    lengths_N = problem.ends_N - problem.starts_N
    most = int(lengths_N.max())
    blocks_L1 = np.arange(1, most + 1)[:, None]
    seconds_LN = problem.visit_s_N + blocks_L1 * problem.busy_block_s_N
    return np.unique(seconds_LN[blocks_L1 <= lengths_N])
