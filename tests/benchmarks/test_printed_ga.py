"""The paper's genetic algorithm as printed."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.printed_ga import LEAST, MOST, breed_printed, printed_cost
from nesa_node.routing.strategies import PrintedRule
from nesa_node.routing.tuning_scenario import TuningScenario
from tests.routing.problems import covered_problem


def test_cost_is_that_of_equation_19() -> None:
    """Added up term by term: every earlier sender, G / C, and 1 / (R + 1) with R = 1 - uptime."""
    problem = covered_problem(np.random.default_rng(1), 8, 6)
    gamma, beta, alpha = 0.7, 1.3, 2.0
    chain = PrintedRule(gamma=gamma, beta=beta, alpha=alpha).choose(problem)
    expected = 0.0
    for at, visit in enumerate(chain):
        for earlier in chain[:at]:
            expected += problem.transfer_s_NN[earlier.node, visit.node] ** gamma
        load = max(problem.load_N[visit.node], 0.01)
        expected += (problem.spare_N[visit.node] / load) ** beta
        expected += (1.0 / (1.0 - problem.reliability_N[visit.node] + 1.0)) ** alpha
    scenario = TuningScenario.from_problem(problem, np.random.default_rng(0))
    assert printed_cost(np.array([gamma, beta, alpha]), [scenario]) == pytest.approx(expected)


def test_children_lie_between_parents_and_the_population_contracts() -> None:
    rng = np.random.default_rng(2)
    genomes = rng.uniform(LEAST, MOST, (400, 3))
    spread = genomes.std(axis=0).mean()
    children = breed_printed(genomes, np.ones(400), rng)
    assert children.min() >= LEAST
    assert children.max() <= MOST
    assert children.std(axis=0).mean() < 0.95 * spread


def test_roulette_prefers_in_proportion() -> None:
    rng = np.random.default_rng(3)
    genomes = np.repeat([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]], 2000, axis=0)
    costs = np.repeat([1.0, 3.0], 2000)
    children = breed_printed(genomes, costs, rng)
    from_first = (children == 1.0).all(axis=1).mean()
    from_second = (children == 2.0).all(axis=1).mean()
    # Chances that both parents are of one kind, and that none of three genes mutates.
    assert from_first == pytest.approx(0.75**2 * 0.9**3, abs=0.03)
    assert from_second == pytest.approx(0.25**2 * 0.9**3, abs=0.02)
