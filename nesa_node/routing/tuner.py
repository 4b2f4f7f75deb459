"""Genetic algorithm for the parameters of the greedy rule (section 3.2, eq. 20, corrected).

A candidate is a point of the unit cube, one axis per gene. Eq. 20 mixes two parents with eta
between 0 and 1: children lie between their parents, and the population only contracts. Here eta is
drawn from -0.25 to 1.25 for each gene, parents are selected by rank (costs near 1 differ too little
for fitness-proportionate selection), the best survive, and genes mutate.

Fitness is step times of the rule's chains relative to the optimum. Eq. 19 uses the rule's own cost;
minimising that over the exponents drives them to their bounds, since it shrinks small terms and
does not measure the chains. So fitness here is measured on the chains, failures and recoveries
included: without those nothing could be learned about alpha. K draws of failures, N nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nesa_node.core.arrays import Floats
from nesa_node.core.errors import MissingBlocksError
from nesa_node.core.ids import Span
from nesa_node.routing.chain_request import (
    RECOVERY_S,
    TOKENS_PER_SESSION,
    Chain,
    ChainProblem,
    ChainRequest,
    build_problem,
    step_time,
)
from nesa_node.routing.search.exact import exact_latency
from nesa_node.routing.search.greedy import (
    SHIPPED_PARAMETERS,
    GreedyInputs,
    GreedyParameters,
    GreedyRule,
)
from nesa_node.topology.snapshot import Snapshot

FAILURE_DRAWS = 32
"""Sessions per scenario for which failures are drawn."""


@dataclass(frozen=True, slots=True, eq=False)
class TuningScenario:
    """A problem with the inputs shared by all candidates, its optimum and drawn failures.

    `failures_N`: share of the K drawn sessions that each node interrupts.
    """

    prepared: GreedyInputs
    optimum_s: float
    failures_N: Floats

    @classmethod
    def from_problem(
        cls,
        problem: ChainProblem,
        rng: np.random.Generator,
        *,
        draws: int = FAILURE_DRAWS,
    ) -> TuningScenario:
        """A scenario of `problem`; a node's reliability is the chance that it stays for a session.

        Raises `MissingBlocksError`.
        """
        optimum_s = step_time(problem, exact_latency(problem)).total_s
        fails_KN = rng.random((draws, problem.num_nodes)) >= problem.reliability_N
        return cls(GreedyInputs.from_problem(problem), optimum_s, fails_KN.mean(axis=0))

    def time_ratio(self, chain: Chain) -> float:
        """Time through `chain`, recoveries included, over the optimum without failures."""
        nodes = [visit.node for visit in chain]
        lost_s = RECOVERY_S * float(self.failures_N[nodes].sum()) / TOKENS_PER_SESSION
        return (step_time(self.prepared.problem, chain).total_s + lost_s) / self.optimum_s


def time_ratios(parameters: GreedyParameters, scenarios: Sequence[TuningScenario]) -> Floats:
    """`TuningScenario.time_ratio` of the chain that the rule picks in each scenario."""
    chains = (GreedyRule(scenario.prepared, parameters).choose() for scenario in scenarios)
    pairs = zip(scenarios, chains, strict=True)
    return np.array([scenario.time_ratio(chain) for scenario, chain in pairs])


def fitness(parameters: GreedyParameters, scenarios: Sequence[TuningScenario]) -> float:
    """The mean of `time_ratios`: 1 is the optimum without failures, less is better."""
    return float(time_ratios(parameters, scenarios).mean())


MAX_NODE_PAIRS = 16_000_000
"""Pairs of nodes in all scenarios that are in memory at once, at 8 bytes each."""
CLIENTS_PER_SNAPSHOT = 3
"""Clients per snapshot: the result of a single one depends too much on its position."""
_MIN_CLIENT_RTT_MS = 1.0


def sample_snapshots(snapshots: Sequence[Snapshot], max_count: int) -> list[Snapshot]:
    """At most `max_count` of the usable snapshots, evenly spaced, within the memory of
    `MAX_NODE_PAIRS`."""
    useful = [each for each in snapshots if _is_useful(each)]
    largest = max((len(each.nodes) for each in useful), default=1)
    count = min(len(useful), max_count, MAX_NODE_PAIRS // (CLIENTS_PER_SNAPSHOT * largest**2))
    if count == 0:
        return []
    return [useful[int(row)] for row in np.unique(np.linspace(0, len(useful) - 1, count).round())]


def make_scenarios(snapshots: Sequence[Snapshot], rng: np.random.Generator) -> list[TuningScenario]:
    """`CLIENTS_PER_SNAPSHOT` scenarios per snapshot; none if no links connect its blocks."""
    found = []
    for snapshot in snapshots:
        for _ in range(CLIENTS_PER_SNAPSHOT):
            problem = build_problem(snapshot, request_beside_node(snapshot, rng))
            with suppress(MissingBlocksError):
                found.append(TuningScenario.from_problem(problem, rng))
    return found


def request_beside_node(snapshot: Snapshot, rng: np.random.Generator) -> ChainRequest:
    """The request of a client beside a random node, with that node's round trips.

    Snapshots do not record where clients are.
    """
    request = ChainRequest(span=Span(0, snapshot.num_blocks))
    if snapshot.links is None:
        return request
    rtt_ms_NN, _ = snapshot.links.select_arrays([node.peer_id for node in snapshot.nodes])
    host = int(rng.integers(len(snapshot.nodes)))
    return replace(request, entry_rtt_ms=np.maximum(rtt_ms_NN[host], _MIN_CLIENT_RTT_MS))


def _is_useful(snapshot: Snapshot) -> bool:
    return snapshot.num_blocks > 0 and snapshot.links is not None and not snapshot.holes()


_ETA_RANGE = (-0.25, 1.25)
_ELITE_SIZE = 2
_MUTATION_RATE = 0.3
_MUTATION_SIZE = 0.12

_GENE_BOUNDS = {
    "gamma": (0.3, 3.0),
    "beta": (0.3, 3.0),
    "alpha": (0.3, 3.0),
    "transfer_weight": (0.03, 10.0),
    "reliability_weight": (0.001, 3.0),
}
"""Bounds of each gene, on a logarithmic scale. `load_weight` is fixed to 1: only ratios matter."""

_BOUND_TOLERANCE = 1e-6
"""Relative tolerance for values at the bounds, which rounding may exceed."""

ParameterCost = Callable[[GreedyParameters], float]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of a search. `history`: the best cost after each candidate."""

    best: GreedyParameters
    cost: float
    history: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TuningReport:
    """Results of the genetic algorithm and of random search, against the parameters before.

    The arrays are time ratios of the held-out scenarios, in their order.
    """

    before: GreedyParameters
    genetic: SearchResult
    random: SearchResult
    before_ratios: Floats
    genetic_ratios: Floats
    random_ratios: Floats

    @property
    def winner(self) -> GreedyParameters:
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
    before: GreedyParameters,
    population: int = 24,
    generations: int = 20,
) -> TuningReport:
    """Search parameters on `scenarios` and judge them on `held_out`.

    `before` provides the values that are not searched (context, load term) and is the first
    candidate of both searches. The same generator state gives the same report. Raises `ValueError`
    if either list is empty.
    """
    if not scenarios or not held_out:
        raise ValueError("tuning needs scenarios to search on, and held-out ones to be judged on")

    def cost(parameters: GreedyParameters) -> float:
        return fitness(parameters, scenarios)

    genetic = genetic_search(cost, rng, before, population=population, generations=generations)
    random = random_search(cost, rng, before, evaluations=len(genetic.history))
    ratios = (time_ratios(each, held_out) for each in (before, genetic.best, random.best))
    return TuningReport(before, genetic, random, *ratios)


def genetic_search(
    cost: ParameterCost,
    rng: np.random.Generator,
    base: GreedyParameters,
    *,
    population: int,
    generations: int,
) -> SearchResult:
    """Evaluates `population` candidates, then per generation as many less the two survivors."""
    if population <= _ELITE_SIZE:
        raise ValueError(f"a population needs more than {_ELITE_SIZE}, got {population}")
    genomes = rng.random((population, len(_GENE_BOUNDS)))
    genomes[0] = encode_genome(base)
    costs = np.array([cost(decode_genome(genome, base)) for genome in genomes])
    history = list(costs)
    for _ in range(generations):
        order = np.argsort(costs, kind="stable")
        genomes, costs = genomes[order], costs[order]
        children = breed_children(genomes, population - _ELITE_SIZE, rng)
        born = np.array([cost(decode_genome(genome, base)) for genome in children])
        history.extend(born)
        genomes = np.concatenate((genomes[:_ELITE_SIZE], children))
        costs = np.concatenate((costs[:_ELITE_SIZE], born))
    best = int(np.argmin(costs))
    return SearchResult(
        decode_genome(genomes[best], base), float(costs[best]), _running_minimum(history)
    )


def random_search(
    cost: ParameterCost, rng: np.random.Generator, base: GreedyParameters, *, evaluations: int
) -> SearchResult:
    """Evaluates `evaluations` independent random candidates, `before` first."""
    genomes = rng.random((evaluations, len(_GENE_BOUNDS)))
    genomes[0] = encode_genome(base)
    costs = [cost(decode_genome(genome, base)) for genome in genomes]
    best = int(np.argmin(costs))
    return SearchResult(
        decode_genome(genomes[best], base), float(costs[best]), _running_minimum(costs)
    )


def encode_genome(parameters: GreedyParameters) -> Floats:
    """The parameters as a point of the unit cube, clipped to it."""
    shares = []
    for name, (least, most) in _GENE_BOUNDS.items():
        value = getattr(parameters, name) / (
            parameters.load_weight if name.endswith("weight") and parameters.load_weight else 1.0
        )
        value = min(max(value, least), most)
        shares.append(math.log(value / least) / math.log(most / least))
    return np.array(shares)


def decode_genome(genome: Floats, base: GreedyParameters) -> GreedyParameters:
    """The parameters at a point of the unit cube; values that are not genes as in `before`."""
    genes = {
        name: least * (most / least) ** float(share)
        for share, (name, (least, most)) in zip(genome, _GENE_BOUNDS.items(), strict=True)
    }
    return replace(base, load_weight=1.0, **genes)


def published_values(parameters: GreedyParameters) -> dict[str, float]:
    """The searched values by name, as they are published."""
    return {name: getattr(parameters, name) for name in (*_GENE_BOUNDS, "load_weight")}


def parse_published(values: Mapping[str, float], base: GreedyParameters) -> GreedyParameters | None:
    """Parameters from published values; None unless these lie within the bounds of a search."""
    if set(values) != {*_GENE_BOUNDS, "load_weight"} or values["load_weight"] != 1.0:
        return None
    for name, (least, most) in _GENE_BOUNDS.items():
        # `not <=` also rejects NaN.
        if not least * (1 - _BOUND_TOLERANCE) <= values[name] <= most * (1 + _BOUND_TOLERANCE):
            return None
    genes: dict[str, Any] = {name: values[name] for name in _GENE_BOUNDS}
    return replace(base, load_weight=1.0, **genes)


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
_POPULATION = 24
_MAX_GENERATIONS = 20


@dataclass(frozen=True, slots=True)
class RetuneResult:
    """The parameters to use, and the reason.

    `gain`: relative gain of the best candidate over those in use, on held-out sessions;
    `gain_error`: its standard error. Both are 0 if nothing was tried.
    """

    parameters: GreedyParameters
    reason: str
    gain: float = 0.0
    gain_error: float = 0.0
    learnt_from: int = 0
    held_out: int = 0
    candidates: int = 0


def retune(
    snapshots: Sequence[Snapshot],
    rng: np.random.Generator,
    *,
    current: GreedyParameters,
    seconds: float,
    clock: Callable[[], float],
    shipped: GreedyParameters = SHIPPED_PARAMETERS,
) -> RetuneResult:
    """Parameters for the swarm of `snapshots` (oldest first), in about `seconds` of `clock`.

    They are searched on the older snapshots and judged on the newest, which are held out.
    Snapshots of one swarm are correlated, so that standard errors are taken over a few periods, not
    over sessions; and hourly tuning makes many comparisons, so that a gain must exceed three.

    `current` (in use) stays unless a candidate gains on held-out snapshots. Tuned parameters
    (`current` is not `shipped`) are replaced by `shipped` if they no longer gain there.
    """
    chosen = sample_snapshots(snapshots, MAX_SNAPSHOTS)
    if len(chosen) < MIN_SNAPSHOTS:
        return RetuneResult(
            current, f"{len(chosen)} snapshots are too few to tune on, {MIN_SNAPSHOTS} are needed"
        )
    cut = round(len(chosen) * (1 - HELD_OUT_FRACTION))
    learn, held_out = make_scenarios(chosen[:cut], rng), make_scenarios(chosen[cut:], rng)
    if len(learn) < MIN_SNAPSHOTS // 2 or len(held_out) < HELD_OUT_PERIODS:
        return RetuneResult(current, "too few snapshots have a chain to tune on")
    if (
        current != shipped
        and time_ratios(current, held_out).mean() >= time_ratios(shipped, held_out).mean()
    ):
        return RetuneResult(
            shipped, "the tuned parameters are no longer better than the shipped ones"
        )
    began = clock()
    fitness(current, learn)
    generations = _affordable_generations(seconds, clock() - began)
    if generations < 1:
        return RetuneResult(current, f"one candidate takes too long for {seconds:g} s")
    report = tune(
        learn, held_out, rng, before=current, population=_POPULATION, generations=generations
    )
    return _judge_winner(report, learnt_from=len(learn))


def _judge_winner(report: TuningReport, *, learnt_from: int) -> RetuneResult:
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


def _affordable_generations(seconds: float, candidate_s: float) -> int:
    """Generations that fit into `seconds`; random search then evaluates as many candidates."""
    candidates = seconds / (2 * max(candidate_s, 1e-6))
    return min(int(candidates / _POPULATION) - 1, _MAX_GENERATIONS)
