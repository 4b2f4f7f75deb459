from __future__ import annotations

import sys

import numpy as np
import pytest

from nesa_node.core.arrays import Floats
from nesa_node.core.errors import ConfigError
from nesa_node.routing.chain_request import Chain, ChainProblem, check_chain, step_time
from nesa_node.routing.search.exact import exact_latency
from nesa_node.routing.search.pareto import measure_objectives, pareto_front
from tests.routing.problems import covered_problem, least_by_trying_everything


def _front_by_trying_everything(problem: ChainProblem, price_N: Floats) -> Floats:
    found: list[tuple[float, ...]] = []

    def note(chain: Chain) -> float:
        found.append(measure_objectives(problem, chain, price_N).as_costs())
        return 0.0

    least_by_trying_everything(problem, note, may_return=False)
    costs = np.unique(np.array(found), axis=0)
    beaten = [((costs <= cost).all(axis=1) & (costs < cost).any(axis=1)).any() for cost in costs]
    front: Floats = costs[~np.array(beaten)]
    return front


def test_front_lies_on_the_true_one_and_holds_the_fastest_chain() -> None:
    pytest.importorskip("pymoo")
    on_it = all_of_it = 0
    for seed in range(4):
        problem = covered_problem(np.random.default_rng(seed), 5, 5)
        price_N = np.random.default_rng(seed).uniform(0.1, 1.0, 5)
        front = pareto_front(problem, price_N, seed=seed, population_size=20, generations=8)
        fastest = step_time(problem, exact_latency(problem)).total_s
        assert front[0].objectives.latency_s == pytest.approx(fastest)
        true_front = _front_by_trying_everything(problem, price_N)
        all_of_it += len(true_front)
        costs = np.array([choice.objectives.as_costs() for choice in front])
        for choice, cost in zip(front, costs, strict=True):
            check_chain(problem, choice.chain)
            assert not (costs < cost).all(axis=1).any()
            on_it += bool(np.isclose(true_front, cost).all(axis=1).any())
    assert on_it >= 0.3 * all_of_it


def test_same_seed_gives_the_same_front() -> None:
    pytest.importorskip("pymoo")
    problem = covered_problem(np.random.default_rng(7), 12, 8)
    price_N = np.ones(12)
    first = pareto_front(problem, price_N, seed=3, population_size=10, generations=3)
    again = pareto_front(problem, price_N, seed=3, population_size=10, generations=3)
    assert first == again


def test_extra_is_named_where_pymoo_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymoo.algorithms.moo.nsga2", None)
    with pytest.raises(ConfigError, match=r"nesa-node\[plan\]"):
        pareto_front(covered_problem(np.random.default_rng(0), 5, 5), np.ones(5), seed=0)
