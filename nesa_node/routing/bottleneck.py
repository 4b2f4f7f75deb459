"""The chain whose slowest node is fastest: what bounds a pipeline that is kept full.

N nodes, B blocks. A node's *seconds per token* are what its visits and blocks take, all of its
visits together; the bottleneck is the largest of any node in the chain. A program over (block,
node) that forgets the sum where a path returns comes out below the true optimum. So chains return
to no node here, as in live sessions, and bounds let nodes return but count their blocks.
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
"""Swarms of up to some twenty nodes are done before."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """A chain, its largest seconds per token of one node, and what no chain can be below."""

    chain: Chain
    seconds: float
    bound_s: float

    @property
    def gap(self) -> float:
        """The share by which the seconds may be above the optimum; 0 if the chain is optimal."""
        return self.seconds / self.bound_s - 1.0 if self.bound_s > 0.0 else 0.0


def bottleneck_s(problem: Problem, chain: Chain) -> float:
    """The largest seconds per token of a node in `chain`, its visits summed."""
    busy_s: dict[int, float] = {}
    for visit in chain:
        seconds = float(problem.visit_s_N[visit.node])
        seconds += (visit.end - visit.start) * float(problem.busy_block_s_N[visit.node])
        busy_s[visit.node] = busy_s.get(visit.node, 0.0) + seconds
    return max(busy_s.values(), default=0.0)


def bottleneck(problem: Problem, *, effort: int = EFFORT) -> Bottleneck:
    """The chain with the least bottleneck; that of least latency if it is among those.

    A threshold on the bottleneck says how many blocks each node may run, and a search whether a
    chain keeps to it. The thresholds that can matter, blocks times seconds of some node, are
    bisected between a relaxation and the chain of least latency. Where `effort` (nodes looked at
    per threshold) ends a search undecided, its threshold counts as too low for the chain but not
    for the bound, and `gap` says what may be lost. Raises as `exact_latency` does.
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
        # The relaxation's own threshold, tried first, nearly always does.
        at = (low + high) // 2
    seconds = bottleneck_s(problem, best)
    return Bottleneck(best, seconds, min(seconds, float(thresholds_s[min(bound, high)])))


def _thresholds(problem: Problem) -> Floats:
    """All that a node's seconds per token can be in one visit, in order."""
    lengths_N = problem.ends_N - problem.starts_N
    most = int(lengths_N.max())
    blocks_L1 = np.arange(1, most + 1)[:, None]
    seconds_LN = problem.visit_s_N + blocks_L1 * problem.busy_block_s_N
    return np.unique(seconds_LN[blocks_L1 <= lengths_N])
