"""The paper's greedy routing rule (eq. 18), corrected: each next node is the cheapest one.

N nodes, B blocks, K pairs of a block and a node that holds it, K_b of them at block b.

As printed, the rule adds (G/C)^beta to a cost and so prefers the busiest node, prefers unreliable
nodes by (1/(R+1))^alpha with R = 1 - uptime, charges transfers from every earlier node although
only the last one sends, adds seconds to dimensionless numbers, and ignores how many blocks a node
covers (`strategies.py` implements it). Here the next node minimises::

    ( w_t sum over the last 1 + context senders of (transfer / reference)^gamma
    + w_c (seconds of the visit, or C/G, / reference)^beta + w_m (1 - G) + w_k (1 - K)
    + w_r (unreliability / reference)^alpha ) / blocks gained

where C is the larger of a node's load and of the used share of its machine's memory, G the free
share of the memory that holds the weights, K that of the KV cache, and unreliability is 1 - R x
S^w_s, with S the topological stability (section 3.1). The last sender's transfer includes the way
back to the client, as far as a node makes it longer: a rule that looks one step ahead would
otherwise choose a faster node on another continent and pay for the return. A node runs its span to
the end, except for blocks that a faster next node also holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nesa_node.core.arrays import Floats, Ints
from nesa_node.routing.chain_request import Chain, ChainProblem, Visit
from nesa_node.routing.search.minplus import holder_mask

LoadTerm = Literal["seconds", "ratio"]

_MIN_SPARE = 0.01
_MAX_SAMPLED_LINKS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyParameters:
    """Exponents and weights of the greedy rule.

    `context` is alpha of eq. 2 (not of eq. 18): earlier senders whose transfers count. `beam`:
    partial chains that are kept, and first nodes that are tried; `branches`: next nodes that are
    tried for each of them. With 1 and 1 it is the rule of the paper. `stability_weight` is w_s,
    `memory_weight` w_m, `cache_weight` w_k; they are 0 since they gain nothing (`benchmarks
    tuning`).
    """

    gamma: float = 1.0
    beta: float = 1.0
    alpha: float = 1.0
    transfer_weight: float = 1.0
    load_weight: float = 1.0
    reliability_weight: float = 0.1
    stability_weight: float = 0.0
    memory_weight: float = 0.0
    cache_weight: float = 0.0
    context: int = 0
    load: LoadTerm = "seconds"
    beam: int = 8
    branches: int = 3

    def __post_init__(self) -> None:
        numbers = (
            *(self.gamma, self.beta, self.alpha),
            *(self.transfer_weight, self.load_weight),
            *(self.reliability_weight, self.stability_weight),
            *(self.memory_weight, self.cache_weight),
        )
        if not all(0.0 <= number < float("inf") for number in numbers) or self.context < 0:
            raise ValueError(f"exponents, weights and context must be finite, not below 0: {self}")
        if self.beam < 1 or self.branches < 1:
            raise ValueError(f"beam and branches must be at least 1: {self}")


@dataclass(frozen=True, slots=True, eq=False)
class GreedyInputs:
    """Arrays of a problem that the rule uses with any parameters, over pairs in block order.

    `first_B1[b]:first_B1[b + 1]` are the pairs of block b. `gained_K`: blocks to the end of the
    node's span. `seconds_K`: time to run them. `ratio_N`: C/G of eq. 18. `reference_unreliable` is
    of 1 - R, without stability. References are medians, so that terms are about 1.
    """

    problem: ChainProblem
    first_B1: tuple[int, ...]
    node_K: Ints
    gained_K: Floats
    seconds_K: Floats
    ratio_N: Floats
    reference_s: float
    reference_unreliable: float

    @classmethod
    def from_problem(cls, problem: ChainProblem) -> GreedyInputs:
        """The inputs of `problem`. Raises `MissingBlocksError` if some block has no holder."""
        block_K, node_K = np.nonzero(holder_mask(problem))
        gained_K = (problem.ends_N[node_K] - block_K).astype(np.float64)
        first_B1 = np.searchsorted(block_K, np.arange(problem.num_blocks + 1))
        seconds_K = problem.visit_s_N[node_K] + gained_K * problem.busy_block_s_N[node_K]
        transfers = problem.transfer_s_NN.ravel()[
            :: max(1, problem.num_nodes**2 // _MAX_SAMPLED_LINKS)
        ]
        return cls(
            problem=problem,
            first_B1=tuple(first_B1.tolist()),
            node_K=node_K,
            gained_K=gained_K,
            seconds_K=seconds_K,
            ratio_N=load_and_pressure(problem) / np.maximum(problem.spare_N, _MIN_SPARE),
            reference_s=_positive_median(np.concatenate((transfers, problem.entry_s_N)), 0.1),
            reference_unreliable=_positive_median(1.0 - problem.reliability_N, 0.01),
        )


def load_and_pressure(problem: ChainProblem) -> Floats:
    """C of eq. 18, [N]: the larger of a node's load and of the used share of its memory."""
    load_N: Floats = np.maximum(problem.load_N, problem.pressure_N)
    return load_N


class GreedyRule:
    """The greedy rule for one problem and one set of parameters; a chain takes up to 1 ms."""

    def __init__(self, prepared: GreedyInputs, parameters: GreedyParameters) -> None:
        self._prepared = prepared
        self._parameters = parameters
        self._fixed_K = self._fixed_costs()

    def _fixed_costs(self) -> Floats:
        """Cost of each pair without its transfer, per block gained, [K]."""
        p, prepared = self._parameters, self._prepared
        if p.load == "seconds":
            load_K = (prepared.seconds_K / prepared.reference_s) ** p.beta
        else:
            load_K = (prepared.ratio_N**p.beta)[prepared.node_K]
        fixed_K: Floats = p.load_weight * load_K
        fixed_K += self._memory_N()[prepared.node_K]
        fixed_K += self._reliability_N(p.stability_weight)[prepared.node_K]
        fixed_K /= prepared.gained_K
        return fixed_K

    def _memory_N(self) -> Floats:
        """The terms of used memory and used cache of each node, weighted."""
        p, problem = self._parameters, self._prepared.problem
        term_N: Floats = p.memory_weight * (1.0 - problem.spare_N)
        term_N += p.cache_weight * (1.0 - problem.cache_N)
        return term_N

    def _reliability_N(self, stability_weight: float) -> Floats:
        """The reliability term of each node, weighted."""
        p, problem = self._parameters, self._prepared.problem
        unreliable_N = 1.0 - problem.reliability_N * problem.stability_N**stability_weight
        term_N: Floats = (unreliable_N / self._prepared.reference_unreliable) ** p.alpha
        return p.reliability_weight * term_N

    def _transfer_term(self, transfer_s: Floats) -> Floats:
        p = self._parameters
        term: Floats = p.transfer_weight * (transfer_s / self._prepared.reference_s) ** p.gamma
        return term

    def scores(self, block: int, senders: Chain) -> tuple[Ints, Floats]:
        """The nodes that hold `block` and the cost of each per block gained, both [K_b].

        `senders` are the visits so far; without any, the client sends.
        """
        prepared = self._prepared
        problem = prepared.problem
        here = slice(prepared.first_B1[block], prepared.first_B1[block + 1])
        nodes = prepared.node_K[here]
        back_s = problem.exit_s_N[nodes]
        if senders:
            last = senders[-1].node
            way_s = problem.transfer_s_NN[last, nodes] + back_s
            way_s -= problem.exit_s_N[last]
            way = self._transfer_term(np.maximum(way_s, 0.0))
        else:
            way = self._transfer_term(problem.entry_s_N[nodes] + back_s)
        for visit in senders[-1 - self._parameters.context : -1]:
            way += self._transfer_term(problem.transfer_s_NN[visit.node, nodes])
        way /= prepared.gained_K[here]
        way += self._fixed_K[here]
        return nodes, way

    def terms(self, chain: Chain) -> dict[str, float]:
        """The weighted terms of `chain`, summed over its visits, not divided by blocks gained.

        "stability", there if it is weighed, is what it adds to the reliability term; "memory" has
        the terms of memory and cache, there if one of them is weighed.
        """
        p, prepared = self._parameters, self._prepared
        sums = {"transfer": 0.0, "load": 0.0, "reliability": 0.0}
        reliability_N, both_N = self._reliability_N(0.0), self._reliability_N(p.stability_weight)
        if p.stability_weight > 0.0:
            sums["stability"] = float((both_N - reliability_N)[[each.node for each in chain]].sum())
        memory_N = self._memory_N()
        if p.memory_weight > 0.0 or p.cache_weight > 0.0:
            sums["memory"] = float(memory_N[[each.node for each in chain]].sum())
        for at, visit in enumerate(chain):
            pairs = slice(prepared.first_B1[visit.start], prepared.first_B1[visit.start + 1])
            nodes, scores = self.scores(visit.start, chain[:at])
            pick = int(np.searchsorted(nodes, visit.node))
            gained = float(prepared.gained_K[pairs][pick])
            fixed = float(self._fixed_K[pairs][pick]) * gained
            sums["transfer"] += float(scores[pick]) * gained - fixed
            sums["load"] += fixed - float(both_N[visit.node] + memory_N[visit.node])
            sums["reliability"] += float(reliability_N[visit.node])
        return sums

    def choose(self) -> Chain:
        """The chain by the rule. It visits no node twice, since each runs to its span's end.

        The node that is cheapest next may be far from all good nodes after it, so that several
        partial chains are kept: those with the least sum of terms per block. Of the whole chains
        the one with the least sum wins.
        """
        p, problem = self._parameters, self._prepared.problem
        if problem.num_blocks == 0:
            return ()
        whole: list[tuple[float, Chain]] = []
        partial: list[tuple[float, Chain]] = [(0.0, ())]
        while partial:
            longer = [each for start in partial for each in self._extend(*start)]
            whole += [each for each in longer if each[1][-1].end == problem.num_blocks]
            least = min(whole, default=None)
            partial = [
                each
                for each in longer
                if each[1][-1].end < problem.num_blocks and (least is None or each < least)
            ]
            partial.sort(key=lambda each: (each[0] / each[1][-1].end, each[1]))
            del partial[p.beam :]
        return shift_boundaries(problem, min(whole)[1])

    def _extend(self, total: float, chain: Chain) -> Iterator[tuple[float, Chain]]:
        """`chain` with each of its cheapest next nodes, and the sums of terms."""
        prepared = self._prepared
        block = chain[-1].end if chain else 0
        nodes, scores = self.scores(block, chain)
        count = self._parameters.branches if chain else self._parameters.beam
        picks = np.argsort(scores, kind="stable")[:count]
        gained = prepared.gained_K[prepared.first_B1[block] + picks]
        sums = total + scores[picks] * gained
        for node, sum_ in zip(nodes[picks].tolist(), sums.tolist(), strict=True):
            yield sum_, (*chain, Visit(node, block, int(prepared.problem.ends_N[node])))


def shift_boundaries(problem: ChainProblem, chain: Chain) -> Chain:
    """`chain` with each block on the faster of two adjacent nodes that hold it; all nodes stay."""
    visits = list(chain)
    for at in range(len(visits) - 1, 0, -1):
        sender, receiver = visits[at - 1], visits[at]
        if problem.busy_block_s_N[receiver.node] < problem.busy_block_s_N[sender.node]:
            cut = max(int(problem.starts_N[receiver.node]), sender.start + 1)
            if cut < receiver.start:
                visits[at - 1] = Visit(sender.node, sender.start, cut)
                visits[at] = Visit(receiver.node, cut, receiver.end)
    return tuple(visits)


def _positive_median(values: Floats, otherwise: float) -> float:
    """The median of the finite positive values, or `otherwise` if there are none."""
    values = values[(values > 0.0) & np.isfinite(values)]
    return float(np.median(values)) if len(values) else otherwise


SHIPPED_PARAMETERS = GreedyParameters(
    gamma=1.13, beta=1.08, alpha=0.69, transfer_weight=1.33, reliability_weight=0.009
)
"""The shipped parameters, by `python -m benchmarks tuning`, seed 0: 288 candidates of the genetic
algorithm on 120 sessions, judged on 432 in further swarms, cloud regions and later times of a
recording. A session takes 1.068 of the shortest time instead of 1.102 with exponents of 1 and a
reliability weight of 0.1; random search finds 1.078. Most of it is the weight of reliability:
measured in half an hour, it says less than assumed. The weight of stability that was found made
sessions longer (1.070), as any weight does, so that it is 0 (`results/tuning-*`)."""
