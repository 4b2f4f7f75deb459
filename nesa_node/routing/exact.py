"""The chain with the shortest time per step: a shortest path that returns to no node."""

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
"""Nodes times sets of watched nodes: a tenth of a second, and 50 MB for 80 blocks."""


@dataclass(frozen=True, slots=True)
class Solved:
    """A chain, its cost, and what no chain can be below; the two are equal if it is optimal."""

    chain: Chain
    cost_s: float
    bound_s: float

    @property
    def gap(self) -> float:
        """The share by which the cost may be above the optimum."""
        return self.cost_s / self.bound_s - 1.0 if self.bound_s > 0.0 else 0.0


def exact_latency(problem: Problem, *, may_return: bool = False) -> Chain:
    """The chain whose step takes least time, as `problem.terms` counts it.

    No node is visited twice, as live sessions demand, unless `may_return`. No blocks give an empty
    chain. Equal costs: see `MinPlus.shortest`. Raises `MissingBlocksError` with the ranges that
    nobody holds, or that no links lead to.
    """
    return solve_latency(problem, may_return=may_return).chain


def solve_latency(
    problem: Problem, *, may_return: bool = False, max_states: int = MAX_STATES
) -> Solved:
    """`exact_latency`, with its proof: what no chain can be below.

    A shortest path may leave a slow node for a fast one and come back. Then such nodes are watched:
    the program runs again over (block, node, which watched nodes were visited), until a path comes
    out that returns to no node, which is optimal, since every other one was allowed, too. Replacing
    all that lies between a node's visits by the node itself makes an allowed chain of any path; its
    cost bounds the search, and where watching needs more than `max_states` per block it is the
    answer.
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
    """`chain` with each node running all between its visits, which its span holds anyway."""
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
    """Why no chain leads to the end though somebody holds every block."""
    run = program.unreached(holds_BN)
    return MissingBlocksError(
        [(run.start, run.end)],
        f"nodes hold blocks {run}, but no chain of links leads through them; see `nesa-node "
        "doctor` on those nodes, or wait for others to join",
    )


def _returns(chain: Chain) -> list[int]:
    """The nodes that occur more than once, the most frequent first."""
    counts = Counter(visit.node for visit in chain)
    twice = [node for node in counts if counts[node] > 1]
    return sorted(twice, key=lambda node: (-counts[node], node))


def _found(program: MinPlus, holds_BN: Mask, solved: Solved) -> Solved:
    if solved.cost_s == math.inf:
        raise not_linked(program, holds_BN)
    return solved
