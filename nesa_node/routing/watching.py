"""Shortest paths that revisit no watched node, by decremental state space relaxation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nesa_node.routing.minplus import SLACK, Mask, MinPlus, Path
from nesa_node.routing.problem import Chain, Floats, Visit

_AT_ONCE = 2
"""Nodes added to the watched set per round: each doubles the number of states."""


class Watching:
    """Decremental state space relaxation over the nodes on paths of at most `limit_s`.

    State (b, m, i) is that of `minplus.py` with the set m of watched nodes visited so far, i
    included: a watched node is entered only from sets without it. The method is from vehicle
    routing (Righini and Salani, 2008; Boland et al., 2006).

    n candidate nodes, B blocks, M sets of watched nodes, L labels (set, node) that may send at a
    boundary, G distinct sets among them, R nodes that receive.
    """

    def __init__(self, program: MinPlus, holds_BN: Mask, limit_s: float) -> None:
        problem = program.problem
        self._nodes, self._ahead_s_Bn = program.worthwhile(holds_BN, limit_s)
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

    def add(self, nodes: Sequence[int], max_states: int) -> bool:
        """Watch the first `_AT_ONCE` of `nodes`; False if `max_states` allows none of them."""
        added = 0
        for node in nodes[:_AT_ONCE]:
            if 2 * self._num_sets * len(self._nodes) <= max_states:
                self._bit_n[np.searchsorted(self._nodes, node)] = self._num_sets
                self._num_sets *= 2
                added += 1
        return added > 0

    def shortest(self, limit_s: float) -> Path | None:
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
                self._enter(block, limit_s * SLACK)
            best_s_Mn = np.minimum(self._done_s_BMn[block], entered_s_Mn)
            after_s = best_s_Mn[:, holders] + self._busy_block_s_n[holders]
            self._done_s_BMn[block + 1][:, holders] = after_s
        ended_s_Mn = self._done_s_BMn[-1] + self._exit_s_n
        best = int(ended_s_Mn.argmin())
        cost_s = float(ended_s_Mn.flat[best])
        if not cost_s <= limit_s * SLACK or cost_s == np.inf:
            return None
        return Path(cost_s, self._trace(*divmod(best, len(self._nodes))))

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
