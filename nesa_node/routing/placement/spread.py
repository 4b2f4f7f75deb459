"""Spreading the holders of each block over failure domains, so that losing one leaves no hole.

A block is exposed to a failure domain that contains all of its holders. Moves of single nodes
reduce the number of such pairs as long as no more holders or replicas are missing in all, and they
cost little (`MAX_SPREAD_COST`). Nodes that no best chain uses are moved first: that costs nothing.

N nodes, B blocks, D failure domains, S starts of a span.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from nesa_node.core.arrays import Floats, Ints
from nesa_node.core.ids import Span
from nesa_node.routing.placement.moves import costs_little
from nesa_node.routing.placement.placement_problem import (
    Assignment,
    PlacementProblem,
    count_exposed_B,
    window_sums,
)
from nesa_node.routing.placement.score import Goal, best_chain, score_assignment

_MAX_PRICED = 8
"""Moves whose cost is computed before the search ends."""


def spread_holders(instance: PlacementProblem, assignment: Assignment, goal: Goal) -> Assignment:
    """`assignment` with fewer exposed blocks, by at most one move of each node."""
    before = score_assignment(instance, assignment)
    moved: set[int] = set()
    while len(moved) < instance.problem.num_nodes:
        for node, spread in spreading_moves(instance, assignment, goal, moved):
            if costs_little(before, score_assignment(instance, spread)):
                assignment = spread
                moved.add(node)
                break
        else:
            break
    return assignment


def spreading_moves(
    instance: PlacementProblem, assignment: Assignment, goal: Goal, fixed: Collection[int]
) -> Iterator[tuple[int, Assignment]]:
    """Single moves that leave fewer blocks exposed, and no more holes or missing replicas.

    Those that leave fewest come first; of equal ones, those of nodes outside the best chains. At
    most `_MAX_PRICED` moves; none of a node in `fixed`.
    """
    exposed = assignment.count_exposed(instance)
    if exposed == 0:
        return
    search = ExposureSearch.begin(instance, assignment)
    busy = _chain_nodes(instance, assignment) if goal == "latency" else frozenset()
    found = []
    for node in np.flatnonzero(instance.max_blocks_N).tolist():
        if node not in fixed:
            left, start = search.best_start(node)
            if left < exposed:
                found.append((left, node in busy, node, start))
    for _, _, node, start in sorted(found)[:_MAX_PRICED]:
        span = Span(start, start + int(instance.max_blocks_N[node]))
        yield node, assignment.with_span(node, span)


def _chain_nodes(instance: PlacementProblem, assignment: Assignment) -> frozenset[int]:
    """Nodes of the clients' best chains."""
    return frozenset(
        visit.node
        for client in range(len(instance.client_problems))
        for visit in best_chain(instance.chain_problem(assignment, client)) or ()
    )


@dataclass(frozen=True, slots=True, eq=False)
class ExposureSearch:
    """Holders of each block, fixed ones included; `inside_DB`: those in each failure domain."""

    instance: PlacementProblem
    domains_DN: Ints
    holds_NB: Ints
    holders_B: Ints
    inside_DB: Ints

    @classmethod
    def begin(cls, instance: PlacementProblem, assignment: Assignment) -> ExposureSearch:
        domains_DN = instance.domains_DN.astype(np.int64)
        holds_NB = assignment.holds_NB(instance.problem.num_blocks).astype(np.int64)
        holders_B = holds_NB.sum(axis=0) + instance.others.holders_B
        inside_DB = domains_DN @ holds_NB + instance.others.inside_DB
        return cls(instance, domains_DN, holds_NB, holders_B, inside_DB)

    def exposed_after(self, node: int, span: Span) -> int:
        """Exposed pairs after a move of `node` to `span`: O(D B), where counting takes O(D N B)."""
        change_B = -self.holds_NB[node]
        change_B[span.start : span.end] += 1
        inside_DB = self.inside_DB + self.domains_DN[:, node, None] * change_B
        return int(count_exposed_B(inside_DB, self.holders_B + change_B).sum())

    def best_start(self, node: int) -> tuple[float, int]:
        """Fewest exposed pairs after a move of `node`, and the start of its span then.

        inf if every start would leave more holes, or more missing replicas, than there are now.
        """
        width = int(self.instance.max_blocks_N[node])
        replicas = self.instance.replicas
        member_D1 = self.domains_DN[:, node, None]
        without_B = self.holders_B - self.holds_NB[node]
        without_DB = self.inside_DB - member_D1 * self.holds_NB[node]
        exposed_S = _totals_S(
            count_exposed_B(without_DB, without_B),
            count_exposed_B(without_DB + member_D1, without_B + 1),
            width,
        )
        holes_S = _totals_S((without_B == 0).astype(np.int64), np.zeros_like(without_B), width)
        missing_S = _totals_S(
            np.maximum(replicas - without_B, 0), np.maximum(replicas - without_B - 1, 0), width
        )
        missing_now = np.maximum(replicas - self.holders_B, 0).sum()
        worse_S = (holes_S > (self.holders_B == 0).sum()) | (missing_S > missing_now)
        exposed_S[worse_S] = np.inf
        start = int(exposed_S.argmin())
        return float(exposed_S[start]), start


def _totals_S(elsewhere_B: Ints, inside_B: Ints, width: int) -> Floats:
    """For each start of a span of `width`: the sum of `inside_B` in it, `elsewhere_B` outside."""
    change_S = window_sums((inside_B - elsewhere_B).astype(np.float64), width)
    return np.asarray(elsewhere_B.sum() + change_S)
