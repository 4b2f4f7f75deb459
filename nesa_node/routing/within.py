"""Search for a chain in which no node exceeds a threshold of seconds per token.

It is a feasibility test of the bottleneck search (`bottleneck.py`).
"""

from __future__ import annotations

import heapq

import numpy as np

from nesa_node.routing.problem import Chain, Problem, Visit

SLACK = 1.0 + 1e-12
"""Relative tolerance, so that a threshold computed from a node's own seconds admits that node."""


class Within:
    """Search for a chain of `problem` in which no node takes more than `threshold_s` per token.

    The threshold gives the number of blocks that each node may run. If all links work it suffices
    to let each node run its maximum: what one node runs more, later ones run less. So the search
    branches over the next node only, spans that end soonest first, and prunes a partial chain if
    the remaining blocks cannot be run even with revisits.
    """

    def __init__(self, problem: Problem, threshold_s: float) -> None:
        left_s_N = threshold_s * SLACK - problem.visit_s_N
        lengths_N = problem.ends_N - problem.starts_N
        with np.errstate(divide="ignore", invalid="ignore"):
            blocks_N = np.where(left_s_N >= 0.0, left_s_N / problem.busy_block_s_N, 0.0)
        self.most_N = np.minimum(np.nan_to_num(blocks_N), lengths_N).astype(np.int64)
        """Maximum blocks of each node in one visit."""
        self.proven = False
        """Whether the last `find` searched everything and found nothing."""
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
        """Whether the blocks from `block` on can be run with revisits and without cut links.

        Each block goes to the node with capacity left whose span ends first. This is optimal, as in
        scheduling unit jobs with release times and deadlines.
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
        """A chain without revisits; None if there is none (`proven`) or `max_tries` ran out."""
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
        # Used nodes matter only while their spans contain blocks still to run.
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
