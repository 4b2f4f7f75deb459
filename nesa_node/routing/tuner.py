"""Genetic algorithm for the parameters of the greedy rule (section 3.2, eq. 20, corrected).

A candidate is a point of the unit cube, one axis per gene. Eq. 20 mixes two parents with eta
between 0 and 1: children lie between their parents, and the population only contracts. Here eta is
drawn from -0.25 to 1.25 for each gene, parents are selected by rank (costs near 1 differ too little
for fitness-proportionate selection), the best survive, and genes mutate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nesa_node.routing.fitness import Scenario, fitness, ratios
from nesa_node.routing.greedy import Parameters
from nesa_node.routing.problem import Floats

_ETA = (-0.25, 1.25)
_ELITE = 2
_MUTATION_RATE = 0.3
_MUTATION_SIZE = 0.12

_GENES = {
    "gamma": (0.3, 3.0),
    "beta": (0.3, 3.0),
    "alpha": (0.3, 3.0),
    "transfer_weight": (0.03, 10.0),
    "reliability_weight": (0.001, 3.0),
}
"""Bounds of each gene, on a logarithmic scale. `load_weight` is fixed to 1: only ratios matter."""

_ROUNDED = 1e-6
"""Relative tolerance for values at the bounds, which rounding may exceed."""

Cost = Callable[[Parameters], float]


@dataclass(frozen=True, slots=True)
class Search:
    """Result of a search. `history`: the best cost after each candidate."""

    best: Parameters
    cost: float
    history: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Results of the genetic algorithm and of random search, against the parameters before.

    `winner` is the better search result on the training scenarios; on the held-out ones it saves
    the share `gain` of the cost per session, with `gain_error` the standard error over sessions.
    """

    before: Parameters
    genetic: Search
    random: Search
    held_out_before: float
    held_out_genetic: float
    held_out_random: float
    gain: float
    gain_error: float
    evaluations: int

    @property
    def winner(self) -> Parameters:
        return (self.random if self.random.cost < self.genetic.cost else self.genetic).best

    @property
    def tuned(self) -> Parameters:
        """`winner` if its gain exceeds two standard errors, else `before`."""
        return self.winner if self.gain > 2.0 * self.gain_error else self.before

    @property
    def genetic_won(self) -> bool:
        return self.held_out_genetic < self.held_out_random

    def __str__(self) -> str:
        won = "beats" if self.genetic_won else "does NOT beat"
        kept = "is kept" if self.tuned == self.before else "goes"
        return (
            f"held out: before {self.held_out_before:.4f}, genetic {self.held_out_genetic:.4f}, "
            f"random {self.held_out_random:.4f}; the genetic algorithm {won} random search "
            f"of as many candidates ({self.evaluations}); the winner saves {self.gain:.2%} "
            f"+- {self.gain_error:.2%}, what was before {kept}"
        )


def tune(
    scenarios: Sequence[Scenario],
    held_out: Sequence[Scenario],
    rng: np.random.Generator,
    *,
    before: Parameters,
    population: int = 24,
    generations: int = 20,
) -> Report:
    """Search parameters on `scenarios` and judge them on `held_out`.

    `before` provides the values that are not searched (context, load term) and is the first
    candidate of both searches. The same generator state gives the same report. Raises `ValueError`
    if either list is empty.
    """
    if not scenarios or not held_out:
        raise ValueError("tuning needs scenarios to search on, and held-out ones to be judged on")

    def cost(parameters: Parameters) -> float:
        return fitness(parameters, scenarios)

    genetic = genetic_search(cost, rng, before, population=population, generations=generations)
    evaluations = len(genetic.history)
    random = random_search(cost, rng, before, evaluations=evaluations)
    old, by_genetic, by_random = (
        ratios(parameters, held_out) for parameters in (before, genetic.best, random.best)
    )
    saved = 1.0 - (by_random if random.cost < genetic.cost else by_genetic) / old
    return Report(
        before=before,
        genetic=genetic,
        random=random,
        held_out_before=float(old.mean()),
        held_out_genetic=float(by_genetic.mean()),
        held_out_random=float(by_random.mean()),
        gain=float(saved.mean()),
        gain_error=float(saved.std() / math.sqrt(len(saved))),
        evaluations=evaluations,
    )


def genetic_search(
    cost: Cost,
    rng: np.random.Generator,
    before: Parameters,
    *,
    population: int,
    generations: int,
) -> Search:
    """Evaluates `population` candidates, then per generation as many less the two survivors."""
    if population <= _ELITE:
        raise ValueError(f"a population needs more than {_ELITE}, got {population}")
    genomes = rng.random((population, len(_GENES)))
    genomes[0] = encode(before)
    costs = np.array([cost(decode(genome, before)) for genome in genomes])
    history = list(costs)
    for _ in range(generations):
        order = np.argsort(costs, kind="stable")
        genomes, costs = genomes[order], costs[order]
        children = breed(genomes, population - _ELITE, rng)
        born = np.array([cost(decode(genome, before)) for genome in children])
        history.extend(born)
        genomes = np.concatenate((genomes[:_ELITE], children))
        costs = np.concatenate((costs[:_ELITE], born))
    best = int(np.argmin(costs))
    return Search(decode(genomes[best], before), float(costs[best]), _least_so_far(history))


def random_search(
    cost: Cost, rng: np.random.Generator, before: Parameters, *, evaluations: int
) -> Search:
    """Evaluates `evaluations` independent random candidates, `before` first."""
    genomes = rng.random((evaluations, len(_GENES)))
    genomes[0] = encode(before)
    costs = [cost(decode(genome, before)) for genome in genomes]
    best = int(np.argmin(costs))
    return Search(decode(genomes[best], before), float(costs[best]), _least_so_far(costs))


def encode(parameters: Parameters) -> Floats:
    """The parameters as a point of the unit cube, clipped to it."""
    shares = []
    for name, (least, most) in _GENES.items():
        value = getattr(parameters, name) / (
            parameters.load_weight if name.endswith("weight") and parameters.load_weight else 1.0
        )
        value = min(max(value, least), most)
        shares.append(math.log(value / least) / math.log(most / least))
    return np.array(shares)


def decode(genome: Floats, before: Parameters) -> Parameters:
    """The parameters at a point of the unit cube; values that are not genes as in `before`."""
    genes = {
        name: least * (most / least) ** float(share)
        for share, (name, (least, most)) in zip(genome, _GENES.items(), strict=True)
    }
    return replace(before, load_weight=1.0, **genes)


def told_of(parameters: Parameters) -> dict[str, float]:
    """The searched values by name, as they are published."""
    return {name: getattr(parameters, name) for name in (*_GENES, "load_weight")}


def believed(told: Mapping[str, float], before: Parameters) -> Parameters | None:
    """Parameters from published values; None unless these lie within the bounds of a search."""
    if set(told) != {*_GENES, "load_weight"} or told["load_weight"] != 1.0:
        return None
    for name, (least, most) in _GENES.items():
        # `not <=` also rejects NaN.
        if not least * (1 - _ROUNDED) <= told[name] <= most * (1 + _ROUNDED):
            return None
    genes: dict[str, Any] = {name: told[name] for name in _GENES}
    return replace(before, load_weight=1.0, **genes)


def breed(genomes: Floats, number: int, rng: np.random.Generator) -> Floats:
    """`number` children [number, genes] of parents selected by rank.

    `genomes` [size, genes] are sorted, the best first.
    """
    size, genes = genomes.shape
    weights = np.arange(size, 0, -1, dtype=np.float64)
    weights /= weights.sum()
    mothers = genomes[rng.choice(size, number, p=weights)]
    fathers = genomes[rng.choice(size, number, p=weights)]
    eta = rng.uniform(*_ETA, (number, genes))
    children = eta * mothers + (1.0 - eta) * fathers
    mutates = rng.random((number, genes)) < _MUTATION_RATE
    children += mutates * rng.normal(0.0, _MUTATION_SIZE, (number, genes))
    clipped: Floats = children.clip(0.0, 1.0)
    return clipped


def _least_so_far(costs: Sequence[float]) -> tuple[float, ...]:
    return tuple(np.minimum.accumulate(np.array(costs)).tolist())
