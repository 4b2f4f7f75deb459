"""Exact search for two chains: the one with the shortest step, and the one of least bottleneck.

The first is a shortest path without revisits. The second has the highest throughput as a full
pipeline: a node's *seconds per token* are the sum over all its visits and blocks, and the
bottleneck is the largest of any node in the chain. A dynamic program over (block, node) that loses
this sum when a path revisits a node would come out below the true optimum. Therefore its chains
visit no node twice, as in live sessions, and bounds allow revisits but count a node's blocks.

N nodes, B blocks.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from nesa_node.core.arrays import Floats
from nesa_node.core.errors import MissingBlocksError
from nesa_node.routing.chain_request import Chain, ChainProblem, Visit, step_time
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
