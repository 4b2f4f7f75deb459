"""Chain selection strategies by name, and explanations of their choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Protocol

import numpy as np

from nesa_node.core.arrays import Floats, Ints
from nesa_node.core.errors import ConfigError, MissingBlocksError
from nesa_node.core.ids import PeerId
from nesa_node.routing.chain_request import (
    SHIPPED_WEIGHTS,
    Chain,
    ChainProblem,
    CostWeights,
    Visit,
    apply_weights,
    step_time,
    weighed_terms,
)
from nesa_node.routing.search.exact import (
    bottleneck_s,
    exact_latency,
    solve_bottleneck,
    unlinked_error,
)
from nesa_node.routing.search.greedy import (
    SHIPPED_PARAMETERS,
    GreedyInputs,
    GreedyParameters,
    GreedyRule,
    load_and_pressure,
)
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
    name: str = "paper-literal"

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
        load = np.maximum(load_and_pressure(problem)[nodes], _MIN_LOAD)
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


MAX_PRICED_LOAD = 0.98
"""Load above which the price grows linearly, so that it stays finite and monotonic."""

COMPUTE_PRICE_WEIGHT = 30.0
"""Weight of a second of compute relative to a second of transfer. Transfers use no compute
capacity: they decide between nodes of similar load, and keep chains short."""


def exact_throughput(problem: ChainProblem) -> Chain:
    """The chain with the least sum of marginal prices. Raises as `exact_latency` does.

    The shortest chain uses the fastest nodes even if they are nearly full. One more session on a
    node with load x delays all its sessions by about the derivative of the queue's length
    x / (1 - x): seconds / (1 - x)^2.
    """
    return exact_latency(apply_marginal_prices(problem))


def apply_marginal_prices(problem: ChainProblem) -> ChainProblem:
    """`problem` with each block at its marginal price, in seconds."""
    price_N = COMPUTE_PRICE_WEIGHT * problem.block_s_N * marginal_price_factor(problem.load_N)
    return replace(problem, block_s_N=price_N, load_N=np.zeros_like(price_N))


def marginal_price_factor(load_N: Floats) -> Floats:
    """1 / (1 - load)^2 up to `MAX_PRICED_LOAD`, linear in the load above."""
    below_N = np.minimum(load_N, MAX_PRICED_LOAD)
    factor_N: Floats = 1.0 / (1.0 - below_N) ** 2 * np.maximum(load_N / MAX_PRICED_LOAD, 1.0)
    return factor_N


class Strategy(Protocol):
    """A way to choose chains by a cost."""

    @property
    def name(self) -> str: ...

    def choose(self, problem: ChainProblem) -> Chain:
        """The chain for `problem`. Raises `MissingBlocksError` if there is none."""

    def terms(self, problem: ChainProblem, chain: Chain) -> Mapping[str, float]:
        """The terms of the cost of `chain`; the cost is their sum."""


@dataclass(frozen=True, slots=True)
class FunctionStrategy:
    """A strategy made of a function; its terms are the times of a step."""

    name: str
    choose: Callable[[ChainProblem], Chain]

    def terms(self, problem: ChainProblem, chain: Chain) -> Mapping[str, float]:
        return asdict(step_time(problem, chain))


MAX_PUBLISHED_EXCESS = 0.05
"""Most that a chain by published weights may cost above the best one by shipped weights."""


@dataclass(frozen=True, slots=True)
class LatencyStrategy:
    """The shortest step. Terms are its seconds and, with `failures`, the expected loss.

    `published`: weights that an orchestrator tuned to this swarm, used with `failures`.
    Orchestrators are not trusted: if the chain that they choose costs more than
    `MAX_PUBLISHED_EXCESS` above the chain by `weights`, as these weigh it, that one is used.
    """

    failures: bool = False
    weights: CostWeights = SHIPPED_WEIGHTS
    published: CostWeights | None = None
    name: str = "exact-latency"

    def choose(self, problem: ChainProblem) -> Chain:
        if not self.failures:
            return exact_latency(problem)
        own = apply_weights(problem, self.weights)
        chain = exact_latency(own)
        if self.published is None or not chain:
            return chain
        tuned = exact_latency(apply_weights(problem, self.published))
        most_s = (1.0 + MAX_PUBLISHED_EXCESS) * step_time(own, chain).total_s
        return tuned if step_time(own, tuned).total_s <= most_s else chain

    def terms(self, problem: ChainProblem, chain: Chain) -> Mapping[str, float]:
        used = self.published or self.weights
        weighed = weighed_terms(problem, chain, used) if self.failures else {}
        return asdict(step_time(problem, chain)) | weighed


@dataclass(frozen=True, slots=True)
class ThroughputStrategy:
    """The smallest marginal price. Terms are seconds, compute at marginal prices."""

    name: str = "exact-throughput"

    def choose(self, problem: ChainProblem) -> Chain:
        return exact_throughput(problem)

    def terms(self, problem: ChainProblem, chain: Chain) -> Mapping[str, float]:
        return asdict(step_time(apply_marginal_prices(problem), chain))


@dataclass(frozen=True, slots=True)
class BottleneckStrategy:
    """The smallest bottleneck. The only term is the seconds per token of the slowest node."""

    name: str = "bottleneck"

    def choose(self, problem: ChainProblem) -> Chain:
        return solve_bottleneck(problem).chain

    def terms(self, problem: ChainProblem, chain: Chain) -> Mapping[str, float]:
        return {"slowest_node_s": bottleneck_s(problem, chain)}


@dataclass(frozen=True, slots=True)
class GreedyStrategy:
    """The greedy rule. Terms are those of eq. 18, corrected, summed over the visits.

    `published`: parameters that orchestrators tuned to this swarm. Orchestrators are not trusted:
    each set is tried, and the chain with the least time, expected failures included, is used, so
    that published parameters cannot make the choice worse.
    """

    parameters: GreedyParameters = SHIPPED_PARAMETERS
    published: tuple[GreedyParameters, ...] = ()
    name: str = "homology-greedy"

    def choose(self, problem: ChainProblem) -> Chain:
        prepared = GreedyInputs.from_problem(problem)
        each = dict.fromkeys((self.parameters, *self.published))
        chains = [GreedyRule(prepared, parameters).choose() for parameters in each]
        if len(chains) == 1:
            return chains[0]
        whole = apply_weights(problem)
        return min(chains, key=lambda chain: step_time(whole, chain).total_s)

    def terms(self, problem: ChainProblem, chain: Chain) -> Mapping[str, float]:
        return GreedyRule(GreedyInputs.from_problem(problem), self.parameters).terms(chain)


DEFAULT_STRATEGY = "exact-latency"

STRATEGIES: dict[str, Callable[[np.random.Generator], Strategy]] = {
    "exact-latency": lambda _: LatencyStrategy(),
    "exact-throughput": lambda _: ThroughputStrategy(),
    "bottleneck": lambda _: BottleneckStrategy(),
    "homology-greedy": lambda _: GreedyStrategy(),
    "paper-literal": lambda _: PrintedRule(),
    "petals": lambda _: FunctionStrategy("petals", petals_chain),
    "random": lambda rng: FunctionStrategy("random", lambda problem: random_chain(problem, rng)),
}


def make_strategy(name: str, rng: np.random.Generator) -> Strategy:
    """The strategy called `name`; `rng` is for random choice. Raises `ConfigError` if unknown."""
    if name not in STRATEGIES:
        names = ", ".join(STRATEGIES)
        raise ConfigError(f"there is no routing strategy {name!r}; choose one of {names}")
    return STRATEGIES[name](rng)


def make_session_strategy(name: str, rng: np.random.Generator) -> Strategy:
    """As `make_strategy`, for live sessions: the default strategy includes expected failures."""
    strategy = make_strategy(name, rng)
    return replace(strategy, failures=True) if isinstance(strategy, LatencyStrategy) else strategy


def reads_stability(strategy: Strategy) -> bool:
    """Whether `stability_N` of a problem can change what `strategy` chooses."""
    match strategy:
        case GreedyStrategy(parameters=shipped, published=published):
            return any(each.stability_weight > 0.0 for each in (shipped, *published))
        case LatencyStrategy(failures=True, weights=weights, published=tuned):
            return weights.stability > 0.0 or (tuned is not None and tuned.stability > 0.0)
    return False


@dataclass(frozen=True, slots=True)
class Alternative:
    """The strategy's choice without the peer `excluded_peer`; None and inf if there is no chain."""

    excluded_peer: PeerId
    chain: Chain | None
    cost: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of a chain: its terms and cost by the strategy, its step time by cause.

    `alternatives`: one per visit, without its node. An alternative cheaper than the chain shows
    that the strategy is a heuristic, or that the swarm has changed since the choice.
    """

    strategy: str
    chain: Chain
    terms: Mapping[str, float]
    cost: float
    step_s: Mapping[str, float]
    alternatives: tuple[Alternative, ...]


def explain(problem: ChainProblem, chain: Chain, strategy: Strategy) -> Explanation:
    """The cost of `chain` by `strategy`, and the strategy's choice without each of its nodes."""
    costs = strategy.terms(problem, chain)
    return Explanation(
        strategy=strategy.name,
        chain=chain,
        terms=costs,
        cost=sum(costs.values()),
        step_s=asdict(step_time(problem, chain)),
        alternatives=tuple(_choose_without(problem, visit.node, strategy) for visit in chain),
    )


def _choose_without(problem: ChainProblem, node: int, strategy: Strategy) -> Alternative:
    ends_N = problem.ends_N.copy()
    ends_N[node] = problem.starts_N[node]
    try:
        chain = strategy.choose(replace(problem, ends_N=ends_N))
    except MissingBlocksError:
        return Alternative(problem.peers[node], None, float("inf"), float("inf"))
    return Alternative(
        excluded_peer=problem.peers[node],
        chain=chain,
        cost=sum(strategy.terms(problem, chain).values()),
        step_s=step_time(problem, chain).total_s,
    )
