"""Multi-objective chain selection (paper, figure 5): the Pareto front of chains.

N nodes, P candidates, K = 3 + N keys. A candidate has a number from 0 to 1 per key: the weights in
seconds of unreliability, price and slowness, and a surcharge for each node. It is decoded to the
shortest path at those costs. So every candidate is a valid chain, and the genetic algorithm
(NSGA-II of pymoo) searches among good ones only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nesa_node.core.arrays import Floats
from nesa_node.core.errors import ConfigError
from nesa_node.routing.chain_request import Chain, ChainProblem, step_time
from nesa_node.routing.search.exact import bottleneck_s, exact_latency

_NUM_WEIGHTS = 3
_WEIGHT_DECADES = 4.0
"""Orders of magnitude between the smallest weight and the largest."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """Objectives of one chain.

    `tokens_per_s`: throughput of its slowest node in a full pipeline. `reliability`: probability
    that none of its nodes fails. `price`: price per token, summed over its nodes.
    """

    latency_s: float
    tokens_per_s: float
    reliability: float
    price: float

    def as_costs(self) -> tuple[float, float, float, float]:
        """The four objectives as costs to minimise."""
        return (self.latency_s, -self.tokens_per_s, -self.reliability, self.price)


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    chain: Chain
    objectives: Objectives


def measure_objectives(problem: ChainProblem, chain: Chain, price_N: Floats) -> Objectives:
    """The objectives of `chain`; `price_N` is the price per token and block of each node."""
    nodes = [visit.node for visit in chain]
    lengths = np.array([visit.end - visit.start for visit in chain])
    slowest_s = bottleneck_s(problem, chain)
    return Objectives(
        latency_s=step_time(problem, chain).total_s,
        tokens_per_s=1.0 / slowest_s if slowest_s > 0.0 else float("inf"),
        reliability=float(problem.reliability_N[nodes].prod()),
        price=float((price_N[nodes] * lengths).sum()),
    )


def pareto_front(
    problem: ChainProblem,
    price_N: Floats,
    *,
    seed: int,
    other_chains: Sequence[Chain] = (),
    population_size: int = 40,
    generations: int = 20,
) -> tuple[ParetoPoint, ...]:
    """The chains that no found chain dominates, the fastest first.

    `other_chains`: further chains to compare, such as those of other strategies. Solves
    `population_size` x `generations` exact searches, about 10 s for 1,000 nodes. Raises
    `ConfigError` without pymoo, `MissingBlocksError` if there is no chain.
    """
    fastest = exact_latency(problem)
    if not fastest:
        return ()
    unit_s = step_time(problem, fastest).total_s / len(fastest)
    found: dict[Chain, Objectives] = {}

    def look(chain: Chain) -> Objectives:
        if chain not in found:
            found[chain] = measure_objectives(problem, chain, price_N)
        return found[chain]

    def chain_of(keys_K: Floats) -> Chain:
        return exact_latency(_apply_charges(problem, price_N, keys_K, unit_s))

    def costs(keys_PK: Floats) -> Floats:
        return np.array([look(chain_of(keys_K)).as_costs() for keys_K in keys_PK])

    for chain in (fastest, *other_chains):
        look(chain)
    _evolve(costs, _NUM_WEIGHTS + problem.num_nodes, seed, population_size, generations)
    costs_P4 = np.array([each.as_costs() for each in found.values()])
    best = [
        chain for chain in found if not _is_dominated(np.array(found[chain].as_costs()), costs_P4)
    ]
    choices = [ParetoPoint(chain, found[chain]) for chain in best]
    return tuple(sorted(choices, key=lambda choice: choice.objectives.as_costs()))


def _apply_charges(
    problem: ChainProblem, price_N: Floats, keys_K: Floats, unit_s: float
) -> ChainProblem:
    """The problem at a candidate's costs. `unit_s`: time of a typical visit."""
    reliability, price, slowness = 10.0 ** (_WEIGHT_DECADES * (keys_K[:_NUM_WEIGHTS] - 0.5))
    unreliable_N = -np.log(np.maximum(problem.reliability_N, 1e-6))
    typical_s = float(np.median(problem.busy_block_s_N)) or 1.0
    typical_price = float(np.median(price_N)) or 1.0
    surcharge_N = np.maximum(keys_K[_NUM_WEIGHTS:] - 0.5, 0.0)
    return replace(
        problem,
        visit_s_N=problem.visit_s_N + unit_s * (reliability * unreliable_N + surcharge_N),
        load_N=np.zeros(problem.num_nodes),
        block_s_N=problem.busy_block_s_N * (1.0 + slowness * problem.busy_block_s_N / typical_s)
        + 0.1 * unit_s * price * price_N / typical_price,
    )


def _is_dominated(costs_4: Floats, others_P4: Floats) -> bool:
    no_worse_P = (others_P4 <= costs_4).all(axis=1)
    return bool((no_worse_P & (others_P4 < costs_4).any(axis=1)).any())


def _evolve(
    costs: Callable[[Floats], Floats], keys: int, seed: int, population: int, generations: int
) -> None:
    try:
        from pymoo.algorithms.moo.nsga2 import NSGA2
        from pymoo.core.problem import Problem as Objective
        from pymoo.optimize import minimize
    except ImportError as error:
        raise ConfigError(
            "a Pareto front needs pymoo: pip install 'nesa-node[plan]' (the extra `plan`)"
        ) from error

    def evaluate(keys_PK: Floats, out: dict[str, Any], *_: Any, **__: Any) -> None:
        out["F"] = costs(keys_PK)

    objective = Objective(n_var=keys, n_obj=4, xl=0.0, xu=1.0)
    objective._evaluate = evaluate
    minimize(objective, NSGA2(pop_size=population), ("n_gen", generations), seed=seed)
