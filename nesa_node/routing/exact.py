"""Exact search for the chain with the shortest step: a shortest path without revisits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from nesa_node.core.errors import MissingBlocksError
from nesa_node.routing.minplus import Mask, MinPlus, Path, held
from nesa_node.routing.problem import Chain, Problem, Visit, terms
from nesa_node.routing.watching import Watching

MAX_STATES = 1 << 15
"""Limit on nodes times sets of watched nodes: 0.1 s, and 50 MB for 80 blocks."""


@dataclass(frozen=True, slots=True)
class Solved:
    """A chain, its cost, and a lower bound for all chains; the two are equal if it is optimal."""

    chain: Chain
    cost_s: float
    bound_s: float

    @property
    def gap(self) -> float:
        """Relative excess of the cost over the bound."""
        return self.cost_s / self.bound_s - 1.0 if self.bound_s > 0.0 else 0.0


def exact_latency(problem: Problem, *, may_return: bool = False) -> Chain:
    """The chain with the shortest step, as `problem.terms` counts it.

    No node is visited twice, as live sessions require, unless `may_return`. No blocks give an empty
    chain. Ties: see `MinPlus.shortest`. Raises `MissingBlocksError` with the ranges that no node
    holds, or that no links lead to.
    """
    return solve_latency(problem, may_return=may_return).chain


def solve_latency(
    problem: Problem, *, may_return: bool = False, max_states: int = MAX_STATES
) -> Solved:
    """The result of `exact_latency` with a lower bound for all chains.

    A shortest path may leave a slow node for a fast one and come back. Such nodes are then watched:
    the search runs again over (block, node, set of watched nodes visited) until the path revisits
    no node. That path is optimal, since its search space included all valid chains. Merging a
    node's visits, and all between them, into one visit makes a valid chain of any path; its cost
    bounds the search, and it is the answer if watching needs more than `max_states` per block.
    """
    if problem.num_blocks == 0:
        return Solved((), 0.0, 0.0)
    program = MinPlus(problem)
    holds_BN = held(problem)
    path = program.shortest(holds_BN)
    if path is None:
        raise not_linked(program, holds_BN)
    if may_return or not _returns(path.chain):
        return Solved(path.chain, path.cost_s, path.cost_s)
    best = _straightened(problem, path.chain)
    watching = Watching(program, holds_BN, best.cost_s)
    while returns := _returns(path.chain):
        if not watching.add(returns, max_states):
            return _found(program, holds_BN, Solved(best.chain, best.cost_s, path.cost_s))
        found = watching.shortest(best.cost_s)
        if found is None or found.cost_s >= best.cost_s:
            return _found(program, holds_BN, Solved(best.chain, best.cost_s, best.cost_s))
        path = found
        best = min(best, _straightened(problem, path.chain), key=lambda path: path.cost_s)
    return Solved(path.chain, path.cost_s, path.cost_s)


def without_returns(chain: Iterable[Visit]) -> Chain:
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


def _straightened(problem: Problem, chain: Chain) -> Path:
    straight = without_returns(chain)
    return Path(terms(problem, straight).total_s, straight)


def not_linked(program: MinPlus, holds_BN: Mask) -> MissingBlocksError:
    """The error for a problem in which every block is held but no links connect the holders."""
    run = program.unreached(holds_BN)
    return MissingBlocksError(
        [(run.start, run.end)],
        f"nodes hold blocks {run}, but no links connect them into a chain; run `nesa-node "
        "doctor` on those nodes, or wait for more nodes to join",
    )


def _returns(chain: Chain) -> list[int]:
    """The nodes visited more than once, the most frequent first."""
    counts = Counter(visit.node for visit in chain)
    twice = [node for node in counts if counts[node] > 1]
    return sorted(twice, key=lambda node: (-counts[node], node))


def _found(program: MinPlus, holds_BN: Mask, solved: Solved) -> Solved:
    if solved.cost_s == math.inf:
        raise not_linked(program, holds_BN)
    return solved
