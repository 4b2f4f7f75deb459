"""The paper's genetic algorithm (section 3.2) as printed: `benchmarks tuning --ga printed`.

Fitness is the inverse of eq. 19, the cost that the printed rule (eq. 18) itself gives to the chains
it chooses. Parents are selected by roulette, in proportion to fitness. Children are eta p1 +
(1 - eta) p2 with eta from 0 to 1 (eq. 20); one gene in ten is drawn anew.

Eq. 19 falls where exponents make its terms smaller, whatever the chains are: it falls by a fifth,
and the chains get no faster. Costs differ too little for a roulette to select, and eq. 20 contracts
the population towards its mean, so that not even the minimum of eq. 19 is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.options import Options
from benchmarks.results import print_table
from nesa_node.core.arrays import Floats
from nesa_node.routing.strategies import PrintedRule
from nesa_node.routing.tuning_scenario import TuningScenario

GENES = ("gamma", "beta", "alpha")
LEAST, MOST = 0.3, 3.0
"""Range of each exponent, which the paper leaves open: that of the corrected algorithm."""
POPULATION = 24
MUTATION_RATE = 0.1


def run_printed(
    options: Options,
    learn: Sequence[TuningScenario],
    held_out: Sequence[TuningScenario],
    rng: np.random.Generator,
) -> list[dict[str, Any]]:
    """A row for exponents of 1, and for each generation's best."""
    genomes = rng.uniform(LEAST, MOST, (POPULATION, len(GENES)))
    found = [("exponents of 1", np.ones(len(GENES)), genomes)]
    for generation in range(min(options.runs, 20) + 1):
        costs = np.array([printed_cost(genome, learn) for genome in genomes])
        found.append((f"generation {generation}", genomes[int(costs.argmin())].copy(), genomes))
        genomes = breed_printed(genomes, costs, rng)
    rows = [
        {
            "parameters": name,
            **dict(zip(GENES, best.tolist(), strict=True)),
            "eq_19": printed_cost(best, learn),
            "spread": float(np.ptp(population, axis=0).mean()),
            "held_out": _held_out(best, held_out),
            "runs": {"eq_19": [printed_cost(best, [scenario]) for scenario in held_out]},
        }
        for name, best, population in found
    ]
    print_table(
        f"As printed, exponents from {LEAST} to {MOST}: eq. 19, and latency over the optimum on "
        "held-out worlds",
        "exponents|gamma|beta|alpha|spread of population|eq. 19|latency",
        [
            (
                str(row["parameters"]),
                *(f"{row[name]:.2f}" for name in GENES),
                f"{row['spread']:.2f}",
                f"{row['eq_19']:.4g}",
                f"{row['held_out']:.3f}",
            )
            for row in rows
        ],
    )
    return rows


def printed_cost(genome: Floats, scenarios: Sequence[TuningScenario]) -> float:
    """Eq. 19, the mean over scenarios: the sum of the rule's terms along the chain it chooses."""
    rule = _rule(genome)
    problems = [scenario.prepared.problem for scenario in scenarios]
    return fmean(sum(rule.terms(problem, rule.choose(problem)).values()) for problem in problems)


def breed_printed(genomes: Floats, costs: Floats, rng: np.random.Generator) -> Floats:
    """The next generation: roulette by 1 / cost, eq. 20, mutation."""
    fitness = 1.0 / costs
    chances = fitness / fitness.sum()
    first, second = (genomes[rng.choice(len(genomes), len(genomes), p=chances)] for _ in range(2))
    eta = rng.uniform(0.0, 1.0, (len(genomes), 1))
    children = eta * first + (1.0 - eta) * second
    mutates = rng.random(children.shape) < MUTATION_RATE
    return np.where(mutates, rng.uniform(LEAST, MOST, children.shape), children)


def _rule(genome: Floats) -> PrintedRule:
    gamma, beta, alpha = genome.tolist()
    return PrintedRule(gamma=gamma, beta=beta, alpha=alpha)


def _held_out(genome: Floats, scenarios: Sequence[TuningScenario]) -> float:
    rule = _rule(genome)
    return fmean(
        scenario.time_ratio(rule.choose(scenario.prepared.problem)) for scenario in scenarios
    )
