"""Genetic algorithm for the parameters of chains (section 3.2, eq. 20, corrected).

It tunes the greedy rule and the weights of the default cost, each in its own `GeneSpace`. A
candidate is a point of the unit cube, one axis per gene. Eq. 20 mixes two parents with eta between
0 and 1: children lie between their parents, and the population only contracts. Here eta is drawn
from -0.25 to 1.25 for each gene, parents are selected by rank (costs near 1 differ too little for
fitness-proportionate selection), the best survive, and genes mutate.

Fitness is step times of the chosen chains relative to the optimum. Eq. 19 uses the rule's own cost;
minimising that over the exponents drives them to their bounds, since it shrinks small terms and
does not measure the chains. So fitness here is measured on the chains, failures and recoveries
included: without those nothing could be learned about alpha (`tuning_scenario.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from nesa_node.core.arrays import Floats
from nesa_node.routing.chain_request import (
    SHIPPED_WEIGHTS,
    Chain,
    CostWeights,
    apply_weights,
)
from nesa_node.routing.search.exact import exact_latency
from nesa_node.routing.search.greedy import (
    SHIPPED_PARAMETERS,
    GreedyParameters,
    GreedyRule,
)
from nesa_node.routing.tuning_scenario import (
    TuningScenario,
    is_useful,
    make_scenarios,
    sample_snapshots,
)
from nesa_node.topology.snapshot import Snapshot

Genes = TypeVar("Genes", GreedyParameters, CostWeights)


@dataclass(frozen=True, slots=True)
class GeneSpace(Generic[Genes]):
    """Fields of parameters that are searched, with bounds, and how parameters choose a chain.

    A gene is on a logarithmic scale, or on a linear one if it may be 0.
    """

    bounds: Mapping[str, tuple[float, float]]
    choose: Callable[[Genes, TuningScenario], Chain]
    prefix: str = ""
    """Prefix of the names under which values are published."""
    population: int = 24
    """Candidates of a generation."""
    time_share: float = 0.5
    """Share of the time for tuning."""

    def encode(self, parameters: Genes) -> Floats:
        """The parameters as a point of the unit cube, clipped to it."""
        shares = []
        for name, (least, most) in self.bounds.items():
            value = min(max(getattr(parameters, name), least), most)
            shares.append(
                math.log(value / least) / math.log(most / least) if least else value / most
            )
        return np.array(shares)

    def decode(self, genome: Floats, base: Genes) -> Genes:
        """The parameters at a point of the unit cube; values that are not genes are `base`'s."""
        genes: dict[str, Any] = {
            name: least * (most / least) ** float(share) if least else most * float(share)
            for share, (name, (least, most)) in zip(genome, self.bounds.items(), strict=True)
        }
        return replace(base, **genes)

    def time_ratios(self, parameters: Genes, scenarios: Sequence[TuningScenario]) -> Floats:
        """`TuningScenario.time_ratio` of the chain that is chosen in each scenario."""
        ratios = [each.time_ratio(self.choose(parameters, each)) for each in scenarios]
        return np.array(ratios)

    def fitness(self, parameters: Genes, scenarios: Sequence[TuningScenario]) -> float:
        """The mean of `time_ratios`: 1 is the optimum without failures, less is better."""
        return float(self.time_ratios(parameters, scenarios).mean())

    def published(self, parameters: Genes) -> dict[str, float]:
        """The searched values by name, as they are published."""
        return {self.prefix + name: getattr(parameters, name) for name in self.bounds}

    def parse(self, values: Mapping[str, float], base: Genes) -> Genes | None:
        """Parameters from `published`; None unless all lie within the bounds of a search."""
        genes: dict[str, Any] = {}
        for name, (least, most) in self.bounds.items():
            value = values.get(self.prefix + name, math.nan)
            # `not <=` also rejects NaN.
            if not least * (1 - _BOUND_TOLERANCE) <= value <= most * (1 + _BOUND_TOLERANCE):
                return None
            genes[name] = value
        return replace(base, **genes)


_BOUND_TOLERANCE = 1e-6
"""Relative tolerance for values at the bounds, which rounding may exceed."""

RULE_GENES: GeneSpace[GreedyParameters] = GeneSpace(
    {
        "gamma": (0.3, 3.0),
        "beta": (0.3, 3.0),
        "alpha": (0.3, 3.0),
        "transfer_weight": (0.03, 10.0),
        "reliability_weight": (0.001, 3.0),
        "stability_weight": (0.0, 2.0),
    },
    lambda parameters, scenario: GreedyRule(scenario.prepared, parameters).choose(),
    time_share=1 / 3,
)
"""Genes of the greedy rule. `load_weight` is none: only ratios of weights matter."""

COST_GENES: GeneSpace[CostWeights] = GeneSpace(
    {"failure": (0.25, 4.0), "stability": (0.0, 2.0), "load": (0.25, 4.0)},
    lambda weights, scenario: exact_latency(apply_weights(scenario.prepared.problem, weights)),
    prefix="cost_",
    population=12,
    time_share=2 / 3,
)
"""Weights of the default cost of sessions. A chain is a shortest path, which takes ten times as
long as the rule's."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """All values that are tuned and published together."""

    rule: GreedyParameters = SHIPPED_PARAMETERS
    weights: CostWeights = SHIPPED_WEIGHTS

    def published(self) -> dict[str, float]:
        return RULE_GENES.published(self.rule) | COST_GENES.published(self.weights)


SHIPPED_TUNING = Tuning()


def parse_published(values: Mapping[str, float]) -> Tuning | None:
    """The tuning from published values; None unless these lie within the bounds of a search."""
    rule = RULE_GENES.parse(values, SHIPPED_PARAMETERS)
    weights = COST_GENES.parse(values, SHIPPED_WEIGHTS)
    if rule is None or weights is None or set(values) != set(SHIPPED_TUNING.published()):
        return None
    return Tuning(rule, weights)


_ETA_RANGE = (-0.25, 1.25)
_ELITE_SIZE = 2
_MUTATION_RATE = 0.3
_MUTATION_SIZE = 0.12


@dataclass(frozen=True, slots=True)
class SearchResult(Generic[Genes]):
    """Result of a search. `history`: the best cost after each candidate."""

    best: Genes
    cost: float
    history: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TuningReport(Generic[Genes]):
    """Results of the genetic algorithm and of random search, against the parameters before.

    The arrays are time ratios of the held-out scenarios, in their order.
    """

    before: Genes
    genetic: SearchResult[Genes]
    random: SearchResult[Genes]
    before_ratios: Floats
    genetic_ratios: Floats
    random_ratios: Floats

    @property
    def winner(self) -> Genes:
        """The better search result on the training scenarios."""
        return (self.random if self._is_random_better else self.genetic).best

    @property
    def winner_ratios(self) -> Floats:
        return self.random_ratios if self._is_random_better else self.genetic_ratios

    @property
    def evaluations(self) -> int:
        """Candidates of each search."""
        return len(self.genetic.history)

    @property
    def _is_random_better(self) -> bool:
        return self.random.cost < self.genetic.cost


def tune(
    scenarios: Sequence[TuningScenario],
    held_out: Sequence[TuningScenario],
    rng: np.random.Generator,
    *,
    space: GeneSpace[Genes],
    before: Genes,
    population: int | None = None,
    generations: int = 20,
) -> TuningReport[Genes]:
    """Search parameters on `scenarios` and judge them on `held_out`.

    `before` provides the values that are not searched (context, load term) and is the first
    candidate of both searches. The same generator state gives the same report. Raises `ValueError`
    if either list is empty.
    """
    if not scenarios or not held_out:
        raise ValueError("tuning needs scenarios to search on, and held-out ones to be judged on")

    def cost(parameters: Genes) -> float:
        return space.fitness(parameters, scenarios)

    genetic = genetic_search(
        cost,
        rng,
        space,
        before,
        population=population or space.population,
        generations=generations,
    )
    random = random_search(cost, rng, space, before, evaluations=len(genetic.history))
    ratios = (space.time_ratios(each, held_out) for each in (before, genetic.best, random.best))
    return TuningReport(before, genetic, random, *ratios)


def genetic_search(
    cost: Callable[[Genes], float],
    rng: np.random.Generator,
    space: GeneSpace[Genes],
    base: Genes,
    *,
    population: int,
    generations: int,
) -> SearchResult[Genes]:
    """Evaluates `population` candidates, then per generation as many less the two survivors."""
    if population <= _ELITE_SIZE:
        raise ValueError(f"a population needs more than {_ELITE_SIZE}, got {population}")
    genomes = rng.random((population, len(space.bounds)))
    genomes[0] = space.encode(base)
    costs = np.array([cost(space.decode(genome, base)) for genome in genomes])
    history = list(costs)
    for _ in range(generations):
        order = np.argsort(costs, kind="stable")
        genomes, costs = genomes[order], costs[order]
        children = breed_children(genomes, population - _ELITE_SIZE, rng)
        born = np.array([cost(space.decode(genome, base)) for genome in children])
        history.extend(born)
        genomes = np.concatenate((genomes[:_ELITE_SIZE], children))
        costs = np.concatenate((costs[:_ELITE_SIZE], born))
    best = int(np.argmin(costs))
    return SearchResult(
        space.decode(genomes[best], base), float(costs[best]), _running_minimum(history)
    )


def random_search(
    cost: Callable[[Genes], float],
    rng: np.random.Generator,
    space: GeneSpace[Genes],
    base: Genes,
    *,
    evaluations: int,
) -> SearchResult[Genes]:
    """Evaluates `evaluations` independent random candidates, `before` first."""
    genomes = rng.random((evaluations, len(space.bounds)))
    genomes[0] = space.encode(base)
    costs = [cost(space.decode(genome, base)) for genome in genomes]
    best = int(np.argmin(costs))
    return SearchResult(
        space.decode(genomes[best], base), float(costs[best]), _running_minimum(costs)
    )


def breed_children(genomes: Floats, num_children: int, rng: np.random.Generator) -> Floats:
    """`num_children` children [num_children, genes] of parents selected by rank.

    `genomes` [size, genes] are sorted, the best first.
    """
    size, genes = genomes.shape
    weights = np.arange(size, 0, -1, dtype=np.float64)
    weights /= weights.sum()
    mothers = genomes[rng.choice(size, num_children, p=weights)]
    fathers = genomes[rng.choice(size, num_children, p=weights)]
    eta = rng.uniform(*_ETA_RANGE, (num_children, genes))
    children = eta * mothers + (1.0 - eta) * fathers
    mutates = rng.random((num_children, genes)) < _MUTATION_RATE
    children += mutates * rng.normal(0.0, _MUTATION_SIZE, (num_children, genes))
    clipped: Floats = children.clip(0.0, 1.0)
    return clipped


def _running_minimum(costs: Sequence[float]) -> tuple[float, ...]:
    return tuple(np.minimum.accumulate(np.array(costs)).tolist())


MIN_SNAPSHOTS = 24
"""Snapshots needed for tuning."""
MAX_SNAPSHOTS = 96
HELD_OUT_FRACTION = 1 / 3
HELD_OUT_PERIODS = 6
"""Periods into which held-out sessions are split for the standard error."""
MIN_GAIN = 0.01
"""Relative gain in session time needed for a change."""
MIN_GAIN_ERRORS = 3.0
"""Gain needed for a change, in standard errors."""
_MIN_GENERATIONS = 2
_MAX_GENERATIONS = 20


@dataclass(frozen=True, slots=True)
class RetuneResult(Generic[Genes]):
    """The parameters to use, and the reason.

    `gain`: relative gain of the best candidate over those in use, on held-out sessions;
    `gain_error`: its standard error. Both are 0 if nothing was tried.
    """

    parameters: Genes
    reason: str
    gain: float = 0.0
    gain_error: float = 0.0
    learnt_from: int = 0
    held_out: int = 0
    candidates: int = 0


@dataclass(frozen=True, slots=True)
class Retuning:
    """Results for the greedy rule and for the weights of the default cost."""

    rule: RetuneResult[GreedyParameters]
    weights: RetuneResult[CostWeights]

    @property
    def tuning(self) -> Tuning:
        return Tuning(self.rule.parameters, self.weights.parameters)


def retune(
    snapshots: Sequence[Snapshot],
    rng: np.random.Generator,
    *,
    current: Tuning,
    seconds: float,
    clock: Callable[[], float],
    shipped: Tuning = SHIPPED_TUNING,
) -> Retuning:
    """Parameters for the swarm of `snapshots` (oldest first), in about `seconds` of `clock`.

    They are searched on the older snapshots and judged on the newest, which are held out.
    Snapshots of one swarm are correlated, so that standard errors are taken over a few periods, not
    over sessions; and hourly tuning makes many comparisons, so that a gain must exceed three.

    `current` (in use) stays unless a candidate gains on held-out snapshots. Tuned parameters
    (`current` is not `shipped`) are replaced by `shipped` if they no longer gain there.
    """
    useful = [each for each in snapshots if is_useful(each)]
    chosen = sample_snapshots(useful, MAX_SNAPSHOTS)
    if len(chosen) < MIN_SNAPSHOTS:
        return _unchanged(
            current, f"{len(chosen)} snapshots are too few to tune on, {MIN_SNAPSHOTS} are needed"
        )
    cut = round(len(chosen) * (1 - HELD_OUT_FRACTION))
    # What is learnt from ends before the held-out time: sessions last into later snapshots.
    earlier = [each for each in useful if each.taken_at < chosen[cut].taken_at]
    learn = make_scenarios(chosen[:cut], earlier, rng)
    held_out = make_scenarios(chosen[cut:], useful, rng)
    if len(learn) < MIN_SNAPSHOTS // 2 or len(held_out) < HELD_OUT_PERIODS:
        return _unchanged(current, "too few snapshots have a chain to tune on")
    sessions = (learn, held_out)
    return Retuning(
        _retune_space(RULE_GENES, sessions, rng, current.rule, shipped.rule, seconds, clock),
        _retune_space(COST_GENES, sessions, rng, current.weights, shipped.weights, seconds, clock),
    )


def _unchanged(current: Tuning, reason: str) -> Retuning:
    return Retuning(RetuneResult(current.rule, reason), RetuneResult(current.weights, reason))


def _retune_space(
    space: GeneSpace[Genes],
    sessions: tuple[Sequence[TuningScenario], Sequence[TuningScenario]],
    rng: np.random.Generator,
    current: Genes,
    shipped: Genes,
    seconds: float,
    clock: Callable[[], float],
) -> RetuneResult[Genes]:
    learn, held_out = sessions
    seconds *= space.time_share
    if current != shipped and space.fitness(current, held_out) >= space.fitness(shipped, held_out):
        return RetuneResult(
            shipped, "the tuned parameters are no longer better than the shipped ones"
        )
    began = clock()
    space.fitness(current, learn)
    candidate_s = clock() - began
    population = space.population
    if _affordable_generations(seconds, candidate_s, population) < _MIN_GENERATIONS:
        # Every second or third session, and so on: a search needs generations more than sessions.
        most_s = seconds / (2 * population * (1 + _MIN_GENERATIONS))
        step = min(math.ceil(candidate_s / most_s), max(1, 2 * len(learn) // MIN_SNAPSHOTS))
        learn, candidate_s = learn[::step], candidate_s / step
    generations = _affordable_generations(seconds, candidate_s, population)
    if generations < 1:
        return RetuneResult(current, f"one candidate takes too long for {seconds:g} s")
    report = tune(
        learn,
        held_out,
        rng,
        space=space,
        before=current,
        generations=generations,
    )
    return _judge_winner(report, learnt_from=len(learn))


def _judge_winner(report: TuningReport[Genes], *, learnt_from: int) -> RetuneResult[Genes]:
    """The winner if it gains enough on the held-out scenarios, else the parameters before."""
    saved = 1.0 - report.winner_ratios / report.before_ratios
    means = np.array([part.mean() for part in np.array_split(saved, HELD_OUT_PERIODS)])
    gain, error = float(saved.mean()), float(means.std(ddof=1) / math.sqrt(len(means)))
    least = max(MIN_GAIN_ERRORS * error, MIN_GAIN)
    found = f"{gain:.2%} +- {error:.2%} gained on {len(saved)} held-out sessions"
    gains = gain > least
    return RetuneResult(
        parameters=report.winner if gains else report.before,
        reason=found if gains else f"{found}: less than {least:.2%}, nothing changes",
        gain=gain,
        gain_error=error,
        learnt_from=learnt_from,
        held_out=len(saved),
        candidates=report.evaluations,
    )


def _affordable_generations(seconds: float, candidate_s: float, population: int) -> int:
    """Generations that fit into `seconds`; random search then evaluates as many candidates."""
    candidates = seconds / (2 * max(candidate_s, 1e-6))
    return min(int(candidates / population) - 1, _MAX_GENERATIONS)
