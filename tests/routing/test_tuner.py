from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest

from benchmarks.tuning import recommended, verdict
from nesa_node.routing.chain_request import (
    RECOVERY_S,
    SHIPPED_WEIGHTS,
    TOKENS_PER_SESSION,
    CostWeights,
    step_time,
)
from nesa_node.routing.search.exact import exact_latency
from nesa_node.routing.search.greedy import GreedyParameters
from nesa_node.routing.tuner import (
    COST_GENES,
    RULE_GENES,
    TuningReport,
    breed_children,
    genetic_search,
    random_search,
    tune,
)
from nesa_node.routing.tuning_scenario import TuningScenario
from tests.routing.problems import covered_problem

BEFORE = GreedyParameters()


def _scenarios(first: int, count: int) -> list[TuningScenario]:
    rng = np.random.default_rng(first)
    return [
        TuningScenario.from_problem(covered_problem(np.random.default_rng(seed), 30, 20), rng)
        for seed in range(first, first + count)
    ]


def test_ratio_is_time_over_the_optimum_with_recoveries() -> None:
    problem = covered_problem(np.random.default_rng(0), 10, 8)
    sure = replace(problem, reliability_N=np.ones(10))
    rng = np.random.default_rng(0)
    scenario = TuningScenario.from_problem(sure, rng)
    chain = exact_latency(sure)
    by_hand = step_time(sure, chain).total_s / scenario.optimum_s
    assert scenario.time_ratio(chain) == pytest.approx(by_hand)
    lost = TuningScenario.from_problem(replace(problem, reliability_N=np.zeros(10)), rng)
    extra = len(chain) * RECOVERY_S / TOKENS_PER_SESSION / scenario.optimum_s
    assert lost.time_ratio(chain) == pytest.approx(by_hand + extra)


def test_genes_survive_their_encoding() -> None:
    parameters = GreedyParameters(gamma=0.5, beta=2.0, alpha=1.5, transfer_weight=3.0, context=2)
    again = RULE_GENES.decode(RULE_GENES.encode(parameters), parameters)
    assert RULE_GENES.encode(again) == pytest.approx(RULE_GENES.encode(parameters))
    assert (again.context, again.stability_weight) == (2, 0.0)
    weights = CostWeights(failure=2.0, stability=0.5, load=0.25)
    decoded = COST_GENES.decode(COST_GENES.encode(weights), SHIPPED_WEIGHTS)
    assert asdict(decoded) == pytest.approx(asdict(weights))


def test_genetic_search_finds_a_known_optimum_better_than_chance() -> None:
    goal = RULE_GENES.encode(GreedyParameters(gamma=0.5, beta=2.0, alpha=0.6, transfer_weight=3.0))

    def cost(parameters: GreedyParameters) -> float:
        return float(np.square(RULE_GENES.encode(parameters) - goal).sum())

    wins = 0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        genetic = genetic_search(cost, rng, RULE_GENES, BEFORE, population=16, generations=12)
        chance = random_search(cost, rng, RULE_GENES, BEFORE, evaluations=len(genetic.history))
        assert list(genetic.history) == sorted(genetic.history, reverse=True)
        assert genetic.cost == pytest.approx(cost(genetic.best))
        wins += genetic.cost < chance.cost
    assert wins >= 9


def _tuned(
    learn: list[TuningScenario], held_out: list[TuningScenario], *, generations: int
) -> TuningReport[GreedyParameters]:
    return tune(
        learn,
        held_out,
        np.random.default_rng(5),
        space=RULE_GENES,
        before=BEFORE,
        population=6,
        generations=generations,
    )


def test_report_is_the_same_for_the_same_seed_and_says_who_won() -> None:
    learn, held_out = _scenarios(0, 4), _scenarios(100, 4)
    first, again = (_tuned(learn, held_out, generations=3) for _ in range(2))
    assert (first.genetic, first.random) == (again.genetic, again.random)
    assert np.array_equal(first.winner_ratios, again.winner_ratios)
    assert first.evaluations == 6 + 3 * 4
    assert first.winner in (first.genetic.best, first.random.best)
    assert RULE_GENES.fitness(BEFORE, held_out) == first.before_ratios.mean()
    assert RULE_GENES.fitness(first.winner, held_out) == first.winner_ratios.mean()
    beats = first.genetic_ratios.mean() < first.random_ratios.mean()
    assert ("does NOT beat" in verdict(first, 0.0, 0.0)) == (not beats)


def test_parameters_that_gain_by_chance_alone_are_not_taken() -> None:
    learn, held_out = _scenarios(0, 2), _scenarios(100, 2)
    report = _tuned(learn, held_out, generations=1)
    assert recommended(report, 0.01, 0.006) == BEFORE
    assert recommended(report, 0.01, 0.004) == report.winner
    assert "is kept" in verdict(report, -0.01, 0.004)


def test_reliability_is_learned_from_failures() -> None:
    """Every node fails or never does: a rule that looks loses far less."""
    rng = np.random.default_rng(0)
    scenarios = []
    for seed in range(6):
        problem = covered_problem(np.random.default_rng(seed), 60, 20)
        problem.reliability_N[:] = np.random.default_rng(seed).choice([0.0, 1.0], 60)
        problem.stability_N[:] = 1.0
        scenarios.append(TuningScenario.from_problem(problem, rng))
    blind = RULE_GENES.fitness(replace(BEFORE, reliability_weight=0.0), scenarios)
    assert RULE_GENES.fitness(replace(BEFORE, reliability_weight=0.3), scenarios) < blind - 0.1


def test_weights_of_the_default_cost_are_learned_from_what_becomes_of_chains() -> None:
    """Stable nodes never fail, the others always; reliability says nothing."""
    scenarios = []
    for seed in range(8):
        drawn = np.random.default_rng(seed)
        problem = covered_problem(drawn, 60, 20)
        problem.stability_N[:] = drawn.choice([0.2, 1.0], 60)
        failures_N = (problem.stability_N < 0.5).astype(np.float64)
        scenarios.append(TuningScenario.from_outcome(problem, problem, failures_N))
    report = tune(
        scenarios[:4],
        scenarios[4:],
        np.random.default_rng(0),
        space=COST_GENES,
        before=SHIPPED_WEIGHTS,
        population=8,
        generations=4,
    )
    assert report.winner.stability > 0.5
    assert report.winner_ratios.mean() < report.before_ratios.mean() - 0.05


def test_tuning_needs_scenarios_to_judge_by() -> None:
    with pytest.raises(ValueError, match="judged"):
        tune(_scenarios(0, 1), [], np.random.default_rng(0), space=RULE_GENES, before=BEFORE)


def test_children_of_equal_parents_mutate_in_three_genes_of_ten() -> None:
    """Without mutation a population of one kind would search no further."""
    children = breed_children(np.full((6, 5), 0.5), 2000, np.random.default_rng(0))
    changed = children != 0.5
    assert changed.mean() == pytest.approx(0.3, abs=0.02)
    assert children[changed].std() == pytest.approx(0.12, abs=0.01)


def test_better_candidates_are_parents_more_often() -> None:
    """By rank: of four, the best in four of ten draws."""
    genomes = np.zeros((4, 1))
    genomes[0] = 1.0
    mixed = [breed_children(genomes, 4000, np.random.default_rng(seed)) for seed in range(3)]
    # Clipping and mutation at the faces of the cube are the same for the worst.
    worst = [breed_children(genomes[::-1], 4000, np.random.default_rng(seed)) for seed in range(3)]
    assert np.mean(mixed) > 0.35
    assert np.mean(worst) < 0.2
