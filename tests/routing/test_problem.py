"""What sessions give for reliability, against every chain there is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nesa_node.routing.chain_request import Chain, ChainProblem, step_time
from nesa_node.routing.search.exact import exact_latency
from nesa_node.routing.strategies import make_session_strategy, make_strategy
from tests.routing.problems import covered_problem, least_by_trying_everything, small_problem

DEFAULT = make_session_strategy("exact-latency", np.random.default_rng(0))


def _survives(problem: ChainProblem, chain: Chain) -> float:
    return float(problem.reliability_N[[visit.node for visit in chain]].prod())


def test_no_chain_has_less_time_and_expected_loss_together() -> None:
    """Ten seconds for each failure, shared by 200 tokens; 200 swarms of up to 6 nodes."""
    compared = 0
    for seed in range(200):
        problem = small_problem(seed)

        def cost(chain: Chain, problem: ChainProblem = problem) -> float:
            fails = sum(1.0 - problem.reliability_N[visit.node] for visit in chain)
            return step_time(problem, chain).total_s + 10.0 * float(fails) / 200

        best = least_by_trying_everything(problem, cost, may_return=False)
        if not np.isfinite(best):
            continue
        chain = DEFAULT.choose(problem)
        assert cost(chain) == pytest.approx(best, rel=1e-9)
        assert sum(DEFAULT.terms(problem, chain).values()) == pytest.approx(best, rel=1e-9)
        compared += 1
    assert compared >= 100


def test_chains_through_shaky_swarms_survive_more_often_than_the_fastest() -> None:
    fastest, chosen = [], []
    for seed in range(20):
        problem = covered_problem(np.random.default_rng(seed), 40, 20)
        fastest.append(_survives(problem, exact_latency(problem)))
        chosen.append(_survives(problem, DEFAULT.choose(problem)))
    assert np.mean(chosen) > np.mean(fastest) + 0.02


def test_sure_nodes_are_chosen_by_time_alone() -> None:
    for seed in range(20):
        problem = covered_problem(np.random.default_rng(seed), 20, 12)
        sure = replace(problem, reliability_N=np.ones(problem.num_nodes))
        assert DEFAULT.choose(sure) == exact_latency(sure)


def test_by_itself_the_strategy_counts_time_alone() -> None:
    alone = make_strategy("exact-latency", np.random.default_rng(0))
    for seed in range(20):
        problem = covered_problem(np.random.default_rng(seed), 20, 12)
        chain = alone.choose(problem)
        assert chain == exact_latency(problem)
        assert sum(alone.terms(problem, chain).values()) == step_time(problem, chain).total_s
