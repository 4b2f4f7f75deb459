"""Exact search for the chain with the shortest step: a shortest path without revisits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from nesa_node.core.arrays import Floats
from nesa_node.core.errors import MissingBlocksError
from nesa_node.routing.problem import Chain, ChainProblem, Visit, step_time
from nesa_node.routing.search.minplus import ROUNDING_SLACK, CostedChain, Mask, MinPlus, holder_mask

_NODES_PER_ROUND = 2
"""Nodes added to the watched set per round: each doubles the number of states."""


class ElementaryPathSearch:
    """Decremental state space relaxation over the nodes on paths of at most `limit_s`.

    State (b, m, i) is that of `minplus.py` with the set m of watched nodes visited so far, i
    included: a watched node is entered only from sets without it. The method is from vehicle
    routing (Righini and Salani, 2008; Boland et al., 2006).

    n candidate nodes, B blocks, M sets of watched nodes, L labels (set, node) that may send at a
    boundary, G distinct sets among them, R nodes that receive.
    """

    def __init__(self, program: MinPlus, holds_BN: Mask, limit_s: float) -> None:
        problem = program.problem
        self._nodes, self._ahead_s_Bn = program.nodes_within(holds_BN, limit_s)
        nodes = self._nodes
        self._num_blocks = problem.num_blocks
        self._holders = [np.flatnonzero(holds_n) for holds_n in holds_BN[:, nodes]]
        self._entry_s_n = problem.entry_s_N[nodes]
        self._visit_s_n = problem.visit_s_N[nodes]
        self._busy_block_s_n = program.busy_block_s_N[nodes]
        self._exit_s_n = problem.exit_s_N[nodes]
        self._nearest_s_n = program.nearest_s_N[nodes]
        self._transfer_s_nn = problem.transfer_s_NN[np.ix_(nodes, nodes)]
        self._bit_n = np.zeros(len(nodes), dtype=np.int64)
        self._num_sets = 1
        self._done_s_BMn: Floats = np.empty(0)
        self._entered_s_BMn: Floats = np.empty(0)

    def watch_nodes(self, nodes: Sequence[int], max_states: int) -> bool:
        """Watch the first `_NODES_PER_ROUND` of `nodes`; False if `max_states` allows none of
        them."""
        added = 0
        for node in nodes[:_NODES_PER_ROUND]:
            if 2 * self._num_sets * len(self._nodes) <= max_states:
                self._bit_n[np.searchsorted(self._nodes, node)] = self._num_sets
                self._num_sets *= 2
                added += 1
        return added > 0

    def shortest(self, limit_s: float) -> CostedChain | None:
        """The cheapest path of at most `limit_s` that revisits no watched node, if any."""
        shape = (self._num_blocks + 1, self._num_sets, len(self._nodes))
        self._done_s_BMn = np.full(shape, np.inf)
        self._entered_s_BMn = np.full(shape, np.inf)
        for block, holders in enumerate(self._holders):
            entered_s_Mn = self._entered_s_BMn[block]
            if block == 0:
                entered_s = self._entry_s_n[holders] + self._visit_s_n[holders]
                entered_s_Mn[self._bit_n[holders], holders] = entered_s
            else:
                self._enter(block, limit_s * ROUNDING_SLACK)
            best_s_Mn = np.minimum(self._done_s_BMn[block], entered_s_Mn)
            after_s = best_s_Mn[:, holders] + self._busy_block_s_n[holders]
            self._done_s_BMn[block + 1][:, holders] = after_s
        ended_s_Mn = self._done_s_BMn[-1] + self._exit_s_n
        best = int(ended_s_Mn.argmin())
        cost_s = float(ended_s_Mn.flat[best])
        if not cost_s <= limit_s * ROUNDING_SLACK or cost_s == np.inf:
            return None
        return CostedChain(cost_s, self._trace(*divmod(best, len(self._nodes))))

    def _enter(self, block: int, limit_s: float) -> None:
        receivers = self._holders[block]
        if not len(receivers):
            return
        # Lower bound on the cost after entering any receiver here, without the transfer to it.
        from_here_s = (self._visit_s_n + self._ahead_s_Bn[block])[receivers].min()
        done_s_Mn = self._done_s_BMn[block]
        sets_L, senders_L = np.nonzero(done_s_Mn + self._nearest_s_n + from_here_s <= limit_s)
        done_s_L = done_s_Mn[sets_L, senders_L]
        reached = done_s_L < np.inf
        sets_L, senders_L, done_s_L = sets_L[reached], senders_L[reached], done_s_L[reached]
        if not len(sets_L):
            return
        sums_s_LR = self._transfer_s_nn[np.ix_(senders_L, receivers)]
        sums_s_LR += done_s_L[:, None]
        firsts_G = np.flatnonzero(np.diff(sets_L, prepend=-1))
        sets_G = sets_L[firsts_G]
        sums_s_GR = np.minimum.reduceat(sums_s_LR, firsts_G, axis=0) + self._visit_s_n[receivers]
        entered_s_Mn = self._entered_s_BMn[block]
        free = self._bit_n[receivers] == 0
        entered_s_Mn[np.ix_(sets_G, receivers[free])] = sums_s_GR[:, free]
        for at in np.flatnonzero(~free):
            bit = self._bit_n[receivers[at]]
            without_it = (sets_G & bit) == 0
            entered_s_Mn[sets_G[without_it] | bit, receivers[at]] = sums_s_GR[without_it, at]

    def _trace(self, visited: int, node: int) -> Chain:
        end = start = self._num_blocks
        visits: list[Visit] = []
        while start > 0:
            start -= 1
            state = (start, visited, node)
            if self._done_s_BMn[state] <= self._entered_s_BMn[state]:
                continue
            visits.append(Visit(int(self._nodes[node]), start, end))
            end = start
            if start > 0:
                visited &= ~int(self._bit_n[node])
                sums_s_n = self._done_s_BMn[start, visited] + self._transfer_s_nn[:, node]
                node = int(sums_s_n.argmin())
        return tuple(reversed(visits))


MAX_STATES = 1 << 15
"""Limit on nodes times sets of watched nodes: 0.1 s, and 50 MB for 80 blocks."""


@dataclass(frozen=True, slots=True)
class LatencySolution:
    """A chain, its cost, and a lower bound for all chains; the two are equal if it is optimal."""

    chain: Chain
    cost_s: float
    bound_s: float

    @property
    def gap(self) -> float:
        """Relative excess of the cost over the bound."""
        return self.cost_s / self.bound_s - 1.0 if self.bound_s > 0.0 else 0.0


def exact_latency(problem: ChainProblem, *, allow_revisits: bool = False) -> Chain:
    """The chain with the shortest step, as `problem.terms` counts it.

    No node is visited twice, as live sessions require, unless `allow_revisits`. No blocks give an
    empty chain. Ties: see `MinPlus.shortest`. Raises `MissingBlocksError` with the ranges that no
    node holds, or that no links lead to.
    """
    return solve_latency(problem, allow_revisits=allow_revisits).chain


def solve_latency(
    problem: ChainProblem, *, allow_revisits: bool = False, max_states: int = MAX_STATES
) -> LatencySolution:
    """The result of `exact_latency` with a lower bound for all chains.

    A shortest path may leave a slow node for a fast one and come back. Such nodes are then watched:
    the search runs again over (block, node, set of watched nodes visited) until the path revisits
    no node. That path is optimal, since its search space included all valid chains. Merging a
    node's visits, and all between them, into one visit makes a valid chain of any path; its cost
    bounds the search, and it is the answer if watching needs more than `max_states` per block.
    """
    if problem.num_blocks == 0:
        return LatencySolution((), 0.0, 0.0)
    program = MinPlus(problem)
    holds_BN = holder_mask(problem)
    path = program.shortest(holds_BN)
    if path is None:
        raise unlinked_error(program, holds_BN)
    if allow_revisits or not _revisited_nodes(path.chain):
        return LatencySolution(path.chain, path.cost_s, path.cost_s)
    best = _without_revisits(problem, path.chain)
    watching = ElementaryPathSearch(program, holds_BN, best.cost_s)
    while returns := _revisited_nodes(path.chain):
        if not watching.watch_nodes(returns, max_states):
            return _require_finite(
                program, holds_BN, LatencySolution(best.chain, best.cost_s, path.cost_s)
            )
        found = watching.shortest(best.cost_s)
        if found is None or found.cost_s >= best.cost_s:
            return _require_finite(
                program, holds_BN, LatencySolution(best.chain, best.cost_s, best.cost_s)
            )
        path = found
        best = min(best, _without_revisits(problem, path.chain), key=lambda path: path.cost_s)
    return LatencySolution(path.chain, path.cost_s, path.cost_s)


def merge_revisits(chain: Iterable[Visit]) -> Chain:
    """`chain` with the visits of each node, and all between them, merged into one visit.

    A node's span is contiguous, so that it holds the blocks between its visits.
    """
    kept: list[Visit] = []
    for visit in chain:
        at = next((at for at, old in enumerate(kept) if old.node == visit.node), None)
        if at is None:
            kept.append(visit)
        else:
            kept[at:] = [Visit(visit.node, kept[at].start, visit.end)]
    return tuple(kept)


def _without_revisits(problem: ChainProblem, chain: Chain) -> CostedChain:
    straight = merge_revisits(chain)
    return CostedChain(step_time(problem, straight).total_s, straight)


def unlinked_error(program: MinPlus, holds_BN: Mask) -> MissingBlocksError:
    """The error for a problem in which every block is held but no links connect the holders."""
    run = program.unreached_span(holds_BN)
    return MissingBlocksError(
        [(run.start, run.end)],
        f"nodes hold blocks {run}, but no links connect them into a chain; run `nesa-node "
        "doctor` on those nodes, or wait for more nodes to join",
    )


def _revisited_nodes(chain: Chain) -> list[int]:
    """The nodes visited more than once, the most frequent first."""
    counts = Counter(visit.node for visit in chain)
    twice = [node for node in counts if counts[node] > 1]
    return sorted(twice, key=lambda node: (-counts[node], node))


def _require_finite(program: MinPlus, holds_BN: Mask, solved: LatencySolution) -> LatencySolution:
    if solved.cost_s == math.inf:
        raise unlinked_error(program, holds_BN)
    return solved
