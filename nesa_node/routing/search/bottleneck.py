"""The chain with the smallest bottleneck: it has the highest throughput as a full pipeline.

N nodes, B blocks. A node's *seconds per token* are the sum over all its visits and blocks; the
bottleneck is the largest of any node in the chain. A dynamic program over (block, node) that loses
this sum when a path revisits a node would come out below the true optimum. Therefore chains here
visit no node twice, as in live sessions, and bounds allow revisits but count a node's blocks.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from dataclasses import dataclass
from functools import partial

import numpy as np

from nesa_node.core.arrays import Floats
from nesa_node.routing.problem import Chain, ChainProblem, Visit
from nesa_node.routing.search.exact import exact_latency

_THRESHOLD_SLACK = 1.0 + 1e-12
"""Relative tolerance, so that a threshold computed from a node's own seconds admits that node."""


class ThresholdSearch:
    """Search for a chain of `problem` in which no node takes more than `threshold_s` per token.

    The threshold gives the number of blocks that each node may run. If all links work it suffices
    to let each node run its maximum: what one node runs more, later ones run less. So the search
    branches over the next node only, spans that end soonest first, and prunes a partial chain if
    the remaining blocks cannot be run even with revisits.
    """

    def __init__(self, problem: ChainProblem, threshold_s: float) -> None:
        left_s_N = threshold_s * _THRESHOLD_SLACK - problem.visit_s_N
        lengths_N = problem.ends_N - problem.starts_N
        with np.errstate(divide="ignore", invalid="ignore"):
            blocks_N = np.where(left_s_N >= 0.0, left_s_N / problem.busy_block_s_N, 0.0)
        self.max_blocks_N = np.minimum(np.nan_to_num(blocks_N), lengths_N).astype(np.int64)
        """Maximum blocks of each node in one visit."""
        self.exhausted = False
        """Whether the last `find` searched everything and found nothing."""
        self._problem = problem
        self._max_blocks = self.max_blocks_N.tolist()
        self._starts = problem.starts_N.tolist()
        self._ends = problem.ends_N.tolist()
        useful = [node for node in range(problem.num_nodes) if self._max_blocks[node] > 0]
        self._by_start = sorted(useful, key=lambda node: (self._starts[node], node))
        self._by_end = sorted(useful, key=lambda node: (self._ends[node], node))
        self._links_work = bool(
            np.isfinite(problem.transfer_s_NN).all()
            and np.isfinite(problem.entry_s_N).all()
            and np.isfinite(problem.exit_s_N).all()
        )
        self._tries_left = 0
        self._infeasible: set[tuple[int, int, frozenset[int]]] = set()

    def is_relaxation_feasible(self, block: int = 0, used: frozenset[int] = frozenset()) -> bool:
        """Whether the blocks from `block` on can be run with revisits and without cut links.

        Each block goes to the node with capacity left whose span ends first. This is optimal, as in
        scheduling unit jobs with release times and deadlines.
        """
        coming = [node for node in self._by_start if node not in used]
        here: list[tuple[int, int]] = []
        at = 0
        for block_now in range(block, self._problem.num_blocks):
            while at < len(coming) and self._starts[coming[at]] <= block_now:
                heapq.heappush(here, (self._ends[coming[at]], self._max_blocks[coming[at]]))
                at += 1
            while here and here[0][0] <= block_now:
                heapq.heappop(here)
            if not here:
                return False
            end, left = here[0]
            if left > 1:
                heapq.heapreplace(here, (end, left - 1))
            else:
                heapq.heappop(here)
        return True

    def find_chain(self, max_steps: int) -> Chain | None:
        """A chain without revisits; None if there is none (`exhausted`) or `max_steps` ran out."""
        self._tries_left = max_steps
        chain = self._extend(())
        self.exhausted = chain is None and self._tries_left > 0
        return chain

    def _extend(self, chain: Chain) -> Chain | None:
        block = chain[-1].end if chain else 0
        last = chain[-1].node if chain else -1
        if block == self._problem.num_blocks:
            return chain if self._links_work or self._problem.exit_s_N[last] < np.inf else None
        used = frozenset(visit.node for visit in chain)
        # Used nodes matter only while their spans contain blocks still to run.
        past = frozenset(node for node in used if self._ends[node] > block)
        state = (block, -1 if self._links_work else last, past)
        if state in self._infeasible:
            return None
        if not self.is_relaxation_feasible(block, past):
            self._infeasible.add(state)
            return None
        for node in self._by_end:
            if node in used or not self._starts[node] <= block < self._ends[node]:
                continue
            if not self._is_linked(last, node):
                continue
            reach = min(self._ends[node], block + self._max_blocks[node])
            for end in range(reach, reach - 1 if self._links_work else block, -1):
                self._tries_left -= 1
                if self._tries_left <= 0:
                    return None
                found = self._extend((*chain, Visit(node, block, end)))
                if found is not None:
                    return found
        self._infeasible.add(state)
        return None

    def _is_linked(self, sender: int, receiver: int) -> bool:
        if self._links_work:
            return True
        problem = self._problem
        way_s = problem.entry_s_N if sender < 0 else problem.transfer_s_NN[sender]
        return bool(way_s[receiver] < np.inf)


MAX_NODES_EXAMINED = 200_000
"""Nodes examined per threshold. Swarms of up to about twenty nodes need fewer."""


@dataclass(frozen=True, slots=True)
class BottleneckSolution:
    """A chain, the seconds per token of its slowest node, and a lower bound for all chains."""

    chain: Chain
    seconds: float
    bound_s: float

    @property
    def gap(self) -> float:
        """Relative excess over the bound; 0 if the chain is proven optimal."""
        return self.seconds / self.bound_s - 1.0 if self.bound_s > 0.0 else 0.0


def bottleneck_s(problem: ChainProblem, chain: Chain) -> float:
    """Seconds per token of the slowest node in `chain`, all its visits summed."""
    busy_s: dict[int, float] = {}
    for visit in chain:
        seconds = float(problem.visit_s_N[visit.node])
        seconds += (visit.end - visit.start) * float(problem.busy_block_s_N[visit.node])
        busy_s[visit.node] = busy_s.get(visit.node, 0.0) + seconds
    return max(busy_s.values(), default=0.0)


def solve_bottleneck(
    problem: ChainProblem, *, max_nodes_examined: int = MAX_NODES_EXAMINED
) -> BottleneckSolution:
    """The chain with the smallest bottleneck; the fastest chain if it is one of them.

    A threshold on the bottleneck limits the blocks that each node may run; a search decides whether
    a chain exists within it. The candidate thresholds (blocks times seconds of some node) are
    bisected between a relaxation and the bottleneck of the fastest chain. If `max_nodes_examined`
    (nodes examined per threshold) runs out, the threshold counts as infeasible for the chain but
    not for the bound, and `gap` is positive. Raises as `exact_latency` does.
    """
    if problem.num_blocks == 0:
        return BottleneckSolution((), 0.0, 0.0)
    best = exact_latency(problem)
    thresholds_s = _candidate_thresholds_s(problem)
    place = partial(np.searchsorted, thresholds_s)
    high = int(place(bottleneck_s(problem, best) / _THRESHOLD_SLACK))
    at = low = bound = bisect_left(
        range(high),
        True,
        key=lambda at: ThresholdSearch(problem, float(thresholds_s[at])).is_relaxation_feasible(),
    )
    while low < high:
        within = ThresholdSearch(problem, float(thresholds_s[at]))
        chain = within.find_chain(max(1, max_nodes_examined // problem.num_nodes))
        if chain is not None:
            best, high = chain, min(at, int(place(bottleneck_s(problem, chain) / _THRESHOLD_SLACK)))
        else:
            low = at + 1
            if within.exhausted:
                bound = low
        # The threshold of the relaxation is tried first: it is nearly always feasible.
        at = (low + high) // 2
    seconds = bottleneck_s(problem, best)
    return BottleneckSolution(best, seconds, min(seconds, float(thresholds_s[min(bound, high)])))


def _candidate_thresholds_s(problem: ChainProblem) -> Floats:
    """Every value that a node's seconds per token can have in one visit, ascending."""
    lengths_N = problem.ends_N - problem.starts_N
    most = int(lengths_N.max())
    blocks_L1 = np.arange(1, most + 1)[:, None]
    seconds_LN = problem.visit_s_N + blocks_L1 * problem.busy_block_s_N
    return np.unique(seconds_LN[blocks_L1 <= lengths_N])
