"""Whether some chain gives no node more than so many seconds per token.

Such a threshold is a number of blocks that each node may run at most. A chain whose nodes run as
many as they may is as good as any, wherever all links work: what a node runs more, later ones run
less. So the search is over who comes next, nodes whose spans end soonest first, and it gives up a
beginning when the rest could not be run even by nodes that may return.
"""

from __future__ import annotations

import heapq

import numpy as np

from nesa_node.routing.problem import Chain, Problem, Visit

SLACK = 1.0 + 1e-12
"""A threshold that was computed from a node's seconds must let that node have them."""


class Within:
    """The chains of `problem` in which no node takes more than `threshold_s` per token."""

    def __init__(self, problem: Problem, threshold_s: float) -> None:
        left_s_N = threshold_s * SLACK - problem.visit_s_N
        lengths_N = problem.ends_N - problem.starts_N
        with np.errstate(divide="ignore", invalid="ignore"):
            blocks_N = np.where(left_s_N >= 0.0, left_s_N / problem.busy_block_s_N, 0.0)
        self.most_N = np.minimum(np.nan_to_num(blocks_N), lengths_N).astype(np.int64)
        """Blocks that a node may run in one visit."""
        self.proven = False
        """Whether `find` has looked at everything."""
        self._problem = problem
        self._most = self.most_N.tolist()
        self._starts = problem.starts_N.tolist()
        self._ends = problem.ends_N.tolist()
        useful = [node for node in range(problem.num_nodes) if self._most[node] > 0]
        self._by_start = sorted(useful, key=lambda node: (self._starts[node], node))
        self._by_end = sorted(useful, key=lambda node: (self._ends[node], node))
        self._links_work = bool(
            np.isfinite(problem.transfer_s_NN).all()
            and np.isfinite(problem.entry_s_N).all()
            and np.isfinite(problem.exit_s_N).all()
        )
        self._tries = 0
        self._hopeless: set[tuple[int, int, frozenset[int]]] = set()

    def may_exist(self, block: int = 0, used: frozenset[int] = frozenset()) -> bool:
        """Whether the blocks from `block` on can be run, if nodes may return and all links work.

        Block by block, of the nodes that have blocks left the one whose span ends first: optimal,
        as for unit jobs with release times and deadlines.
        """
        coming = [node for node in self._by_start if node not in used]
        here: list[tuple[int, int]] = []
        at = 0
        for block_now in range(block, self._problem.num_blocks):
            while at < len(coming) and self._starts[coming[at]] <= block_now:
                heapq.heappush(here, (self._ends[coming[at]], self._most[coming[at]]))
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

    def find(self, max_tries: int) -> Chain | None:
        """A chain, no node twice in it; None if there is none (`proven`) or none was found."""
        self._tries = max_tries
        chain = self._extend(())
        self.proven = chain is None and self._tries > 0
        return chain

    def _extend(self, chain: Chain) -> Chain | None:
        block = chain[-1].end if chain else 0
        last = chain[-1].node if chain else -1
        if block == self._problem.num_blocks:
            return chain if self._links_work or self._problem.exit_s_N[last] < np.inf else None
        used = frozenset(visit.node for visit in chain)
        # Whom the chain has used matters only while they hold what is still to be run.
        past = frozenset(node for node in used if self._ends[node] > block)
        state = (block, -1 if self._links_work else last, past)
        if state in self._hopeless:
            return None
        if not self.may_exist(block, past):
            self._hopeless.add(state)
            return None
        for node in self._by_end:
            if node in used or not self._starts[node] <= block < self._ends[node]:
                continue
            if not self._linked(last, node):
                continue
            reach = min(self._ends[node], block + self._most[node])
            for end in range(reach, reach - 1 if self._links_work else block, -1):
                self._tries -= 1
                if self._tries <= 0:
                    return None
                found = self._extend((*chain, Visit(node, block, end)))
                if found is not None:
                    return found
        self._hopeless.add(state)
        return None

    def _linked(self, sender: int, receiver: int) -> bool:
        if self._links_work:
            return True
        problem = self._problem
        way_s = problem.entry_s_N if sender < 0 else problem.transfer_s_NN[sender]
        return bool(way_s[receiver] < np.inf)
