"""The chain with the shortest time per step: a shortest path that returns to no node."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from nesa_node.core.errors import MissingBlocksError
from nesa_node.routing.minplus import Mask, MinPlus, Path, held
from nesa_node.routing.problem import Chain, Ints, Problem, Visit, terms

MAX_SEARCHES = 1000
"""Shortest paths that one search may cost. Swarms of nodes that nobody made up need a few."""


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


NO_CHAIN = Solved((), math.inf, math.inf)


def exact_latency(problem: Problem, *, may_return: bool = False) -> Chain:
    """The chain whose step takes least time, as `problem.terms` counts it.

    No node is visited twice, as live sessions demand, unless `may_return`. No blocks give an empty
    chain. Equal costs: see `MinPlus.shortest`. Raises `MissingBlocksError` with the ranges that
    nobody holds, or that no links lead to.
    """
    return solve_latency(problem, may_return=may_return).chain


def solve_latency(
    problem: Problem, *, may_return: bool = False, max_searches: int = MAX_SEARCHES
) -> Solved:
    """`exact_latency`, with its proof: what no chain can be below."""
    if problem.num_blocks == 0:
        return Solved((), 0.0, 0.0)
    program = MinPlus(problem)
    holds_BN = held(problem)
    if may_return:
        path = program.shortest(holds_BN)
        solved = Solved(path.chain, path.cost_s, path.cost_s) if path is not None else NO_CHAIN
    else:
        solved = search(program, holds_BN, max_searches=max_searches)
    if solved.cost_s == math.inf:
        raise _not_linked(program, holds_BN)
    return solved


def search(
    program: MinPlus, holds_BN: Mask, *, most_N: Ints | None = None, max_searches: int
) -> Solved:
    """The cheapest chain that visits no node twice, nor runs more than `most_N` blocks on it.

    A shortest path may leave a slow node for a fast one and come back. So the search is branch and
    bound: where the relaxed optimum visits a node twice, parting at block boundary `m`, any allowed
    chain uses that node before `m` only, after `m` only, or in one run across `m`; each of these
    three is searched with its own shortest path, cheapest first. The cost of every open branch is a
    lower bound, so that the first chain without a repetition is optimal. Replacing all that lies
    between a node's visits by the node itself may make an allowed chain of a path: what costs more
    than the best of those is not searched, and after `max_searches` it is the answer. A cost of
    infinity says that none was found, a bound of infinity that there is none.
    """
    best = Path(math.inf, ())
    order = itertools.count()
    searches = 0
    branches: list[tuple[float, int, int, Path, Mask]] = []

    def look(masked_BN: Mask) -> None:
        nonlocal best, searches
        searches += 1
        found = program.shortest(masked_BN, most_N=most_N, below_s=best.cost_s)
        if found is not None:
            straight = _straightened(program.problem, found.chain, most_N)
            best = min(best, straight, key=lambda path: (path.cost_s, len(path.chain)))
            entry = (found.cost_s, len(found.chain), next(order), found, masked_BN)
            heapq.heappush(branches, entry)

    look(holds_BN)
    while branches:
        _, _, _, path, masked_BN = heapq.heappop(branches)
        twice = _first_repetition(path.chain)
        if twice is None:
            return Solved(path.chain, path.cost_s, path.cost_s)
        if path.cost_s >= best.cost_s:
            break
        if searches >= max_searches:
            return Solved(best.chain, best.cost_s, path.cost_s)
        for narrowed_BN in _branch(masked_BN, *twice):
            look(narrowed_BN)
    return Solved(best.chain, best.cost_s, best.cost_s)


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


def _straightened(problem: Problem, chain: Chain, most_N: Ints | None) -> Path:
    straight = without_returns(chain)
    if most_N is not None and any(visit.end - visit.start > most_N[visit.node] for visit in straight):
        return Path(math.inf, ())
    return Path(terms(problem, straight).total_s, straight)


def _not_linked(program: MinPlus, holds_BN: Mask) -> MissingBlocksError:
    run = program.unreached(holds_BN)
    return MissingBlocksError(
        [(run.start, run.end)],
        f"nodes hold blocks {run}, but no chain of links leads through them; see `nesa-node "
        "doctor` on those nodes, or wait for others to join",
    )


def _first_repetition(chain: Chain) -> tuple[int, int] | None:
    """A node that occurs twice and the boundary at the end of its first run."""
    ends: dict[int, int] = {}
    for visit in chain:
        if visit.node in ends:
            return visit.node, ends[visit.node]
        ends[visit.node] = visit.end
    return None


def _branch(holds_BN: Mask, node: int, boundary: int) -> list[Mask]:
    """The three ways to use `node` in one run at most: before, after, or across `boundary`."""
    before_BN, after_BN, across_BN = holds_BN.copy(), holds_BN.copy(), holds_BN.copy()
    before_BN[boundary:, node] = False
    after_BN[:boundary, node] = False
    # Nobody else may run the two blocks at the boundary, so that it stays for both.
    across_BN[boundary - 1 : boundary + 1] = False
    across_BN[boundary - 1 : boundary + 1, node] = holds_BN[boundary - 1 : boundary + 1, node]
    return [before_BN, after_BN, across_BN]
