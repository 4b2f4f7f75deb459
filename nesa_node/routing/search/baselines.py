"""Baseline strategies: the paper's rule as printed, Petals' rule, and random choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nesa_node.core.arrays import Floats, Ints
from nesa_node.routing.problem import Chain, ChainProblem, Visit
from nesa_node.routing.search.exact import unlinked_error
from nesa_node.routing.search.minplus import MinPlus, holder_mask

_MIN_LOAD = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedRule:
    """Eq. 18 as printed: the next node minimises::

        sum over all earlier j of (D / B + L)^gamma + (G / C)^beta + (1 / (R + 1))^alpha

    with G the spare memory, C the load, R = 1 - uptime. `greedy.py` lists its errors.
    """

    gamma: float = 1.0
    beta: float = 1.0
    alpha: float = 1.0

    def choose(self, problem: ChainProblem) -> Chain:
        """The chain by the printed rule; each node runs its span to the end.

        Raises `MissingBlocksError`.
        """

        def pick(chain: Chain, nodes: Ints) -> int:
            terms = self._terms(problem, chain, nodes)
            return int(np.argmin(terms["transfer"] + terms["load"] + terms["reliability"]))

        return _build_greedily(problem, pick)

    def terms(self, problem: ChainProblem, chain: Chain) -> dict[str, float]:
        """The rule's three terms, each summed over the visits."""
        sums = {"transfer": 0.0, "load": 0.0, "reliability": 0.0}
        for at, visit in enumerate(chain):
            node = np.array([visit.node])
            for name, term in self._terms(problem, chain[:at], node).items():
                sums[name] += float(term[0])
        return sums

    def _terms(self, problem: ChainProblem, chain: Chain, nodes: Ints) -> dict[str, Floats]:
        senders = np.array([visit.node for visit in chain], dtype=np.int64)
        load = np.maximum(problem.load_N[nodes], _MIN_LOAD)
        unreliable = 1.0 - problem.reliability_N[nodes]
        return {
            "transfer": (problem.transfer_s_NN[np.ix_(senders, nodes)] ** self.gamma).sum(axis=0),
            "load": (problem.spare_N[nodes] / load) ** self.beta,
            "reliability": (1.0 / (unreliable + 1.0)) ** self.alpha,
        }


def petals_chain(problem: ChainProblem) -> Chain:
    """The shortest path that leaves nodes only at the end of their spans, as Petals clients do.

    Such a path visits no node twice. Raises `MissingBlocksError`.
    """
    if problem.num_blocks == 0:
        return ()
    program, holds_BN = MinPlus(problem), holder_mask(problem)
    path = program.shortest(holds_BN, at_ends=True)
    if path is None:
        raise unlinked_error(program, holds_BN)
    return path.chain


def random_chain(problem: ChainProblem, rng: np.random.Generator) -> Chain:
    """A random holder of each next block, to the end of its span. Raises `MissingBlocksError`."""
    return _build_greedily(problem, lambda _, nodes: int(rng.integers(len(nodes))))


def _build_greedily(problem: ChainProblem, pick: Callable[[Chain, Ints], int]) -> Chain:
    """Extend a chain to the last block; `pick` returns an index into the holders of the next."""
    holds_BN = holder_mask(problem)
    chain: Chain = ()
    block = 0
    while block < problem.num_blocks:
        nodes = np.flatnonzero(holds_BN[block])
        node = int(nodes[pick(chain, nodes)])
        chain = (*chain, Visit(node, block, int(problem.ends_N[node])))
        block = chain[-1].end
    return chain
