"""Chain selection strategies by name, and explanations of their choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

import numpy as np

from nesa_node.core.errors import ConfigError, MissingBlocksError
from nesa_node.core.ids import PeerId
from nesa_node.routing.baselines import Printed, petals_chain, random_chain
from nesa_node.routing.bottleneck import bottleneck, bottleneck_s
from nesa_node.routing.exact import exact_latency
from nesa_node.routing.failures import chain_lost_s, with_failures
from nesa_node.routing.greedy import GreedyRule, Parameters, Prepared
from nesa_node.routing.problem import Chain, Problem, terms
from nesa_node.routing.throughput import exact_throughput, priced
from nesa_node.routing.tuned import TUNED


class Strategy(Protocol):
    """A way to choose chains by a cost."""

    @property
    def name(self) -> str: ...

    def choose(self, problem: Problem) -> Chain:
        """The chain for `problem`. Raises `MissingBlocksError` if there is none."""

    def terms(self, problem: Problem, chain: Chain) -> Mapping[str, float]:
        """The terms of the cost of `chain`; the cost is their sum."""


@dataclass(frozen=True, slots=True)
class Plain:
    """A strategy made of a function; its terms are the times of a step."""

    name: str
    choose: Callable[[Problem], Chain]

    def terms(self, problem: Problem, chain: Chain) -> Mapping[str, float]:
        return asdict(terms(problem, chain))


@dataclass(frozen=True, slots=True)
class Latency:
    """The shortest step. Terms are its seconds and, with `failures`, the expected loss."""

    failures: bool = False
    name: str = "exact-latency"

    def choose(self, problem: Problem) -> Chain:
        return exact_latency(with_failures(problem) if self.failures else problem)

    def terms(self, problem: Problem, chain: Chain) -> Mapping[str, float]:
        lost = {"failures_s": chain_lost_s(problem, chain)} if self.failures else {}
        return asdict(terms(problem, chain)) | lost


@dataclass(frozen=True, slots=True)
class Throughput:
    """The smallest marginal price. Terms are seconds, compute at marginal prices."""

    name: str = "exact-throughput"

    def choose(self, problem: Problem) -> Chain:
        return exact_throughput(problem)

    def terms(self, problem: Problem, chain: Chain) -> Mapping[str, float]:
        return asdict(terms(priced(problem), chain))


@dataclass(frozen=True, slots=True)
class SlowestNode:
    """The smallest bottleneck. The only term is the seconds per token of the slowest node."""

    name: str = "bottleneck"

    def choose(self, problem: Problem) -> Chain:
        return bottleneck(problem).chain

    def terms(self, problem: Problem, chain: Chain) -> Mapping[str, float]:
        return {"slowest_node_s": bottleneck_s(problem, chain)}


@dataclass(frozen=True, slots=True)
class Greedy:
    """The greedy rule. Terms are those of eq. 18, corrected, summed over the visits.

    `published`: parameters that orchestrators tuned to this swarm. Orchestrators are not trusted:
    each set is tried, and the chain with the least time, expected failures included, is used, so
    that published parameters cannot make the choice worse.
    """

    parameters: Parameters = TUNED
    published: tuple[Parameters, ...] = ()
    name: str = "homology-greedy"

    def choose(self, problem: Problem) -> Chain:
        prepared = Prepared.of(problem)
        each = dict.fromkeys((self.parameters, *self.published))
        chains = [GreedyRule(prepared, parameters).choose() for parameters in each]
        if len(chains) == 1:
            return chains[0]
        whole = with_failures(problem)
        return min(chains, key=lambda chain: terms(whole, chain).total_s)

    def terms(self, problem: Problem, chain: Chain) -> Mapping[str, float]:
        return GreedyRule(Prepared.of(problem), self.parameters).terms(chain)


@dataclass(frozen=True, slots=True)
class Literal:
    """The printed rule. Terms are those of eq. 18 as printed, summed over the visits."""

    rule: Printed = field(default_factory=Printed)
    name: str = "paper-literal"

    def choose(self, problem: Problem) -> Chain:
        return self.rule.choose(problem)

    def terms(self, problem: Problem, chain: Chain) -> Mapping[str, float]:
        return self.rule.terms(problem, chain)


DEFAULT = "exact-latency"

STRATEGIES: dict[str, Callable[[np.random.Generator], Strategy]] = {
    "exact-latency": lambda _: Latency(),
    "exact-throughput": lambda _: Throughput(),
    "bottleneck": lambda _: SlowestNode(),
    "homology-greedy": lambda _: Greedy(),
    "paper-literal": lambda _: Literal(),
    "petals": lambda _: Plain("petals", petals_chain),
    "random": lambda rng: Plain("random", lambda problem: random_chain(problem, rng)),
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
    return replace(strategy, failures=True) if isinstance(strategy, Latency) else strategy


@dataclass(frozen=True, slots=True)
class Alternative:
    """The strategy's choice without the peer `without`; None and inf if there is no chain."""

    without: PeerId
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


def explain(problem: Problem, chain: Chain, strategy: Strategy) -> Explanation:
    """The cost of `chain` by `strategy`, and the strategy's choice without each of its nodes."""
    costs = strategy.terms(problem, chain)
    return Explanation(
        strategy=strategy.name,
        chain=chain,
        terms=costs,
        cost=sum(costs.values()),
        step_s=asdict(terms(problem, chain)),
        alternatives=tuple(_alternative(problem, visit.node, strategy) for visit in chain),
    )


def _alternative(problem: Problem, node: int, strategy: Strategy) -> Alternative:
    ends_N = problem.ends_N.copy()
    ends_N[node] = problem.starts_N[node]
    try:
        chain = strategy.choose(replace(problem, ends_N=ends_N))
    except MissingBlocksError:
        return Alternative(problem.peers[node], None, float("inf"), float("inf"))
    return Alternative(
        without=problem.peers[node],
        chain=chain,
        cost=sum(strategy.terms(problem, chain).values()),
        step_s=terms(problem, chain).total_s,
    )
