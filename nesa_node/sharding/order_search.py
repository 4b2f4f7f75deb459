"""Search of an order, and of the machines' order, whose slices have the fastest slowest block.

Source: section 2.6.1 of the Nesa paper, a genetic algorithm with random keys (BRKGA; Goncalves and
Resende 2011). Keys of operations decide which comes next of those that can, those of machines which
takes the first slice. Where pairs of machines have rates, slices are cut by an estimate that cannot
tell from where values come; further keys decide how slow it takes each machine to be. Parents are
one of the elite and one of the rest, and a child takes each key of the elite parent with
probability `BIAS`. The paper prints the average of two parents instead (`Crossover` "arithmetic"),
which draws all keys towards the middle.

N operations, K machines, P candidates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

import numpy as np

from nesa_node.core.errors import ConfigError
from nesa_node.sharding.operation_graph import Floats, Ints, Machine, OperationGraph
from nesa_node.sharding.operation_orders import OrderMaker
from nesa_node.sharding.pair_rates import PairRates
from nesa_node.sharding.slicing import Slicing, slice_order

Crossover = Literal["biased", "arithmetic"]

ELITES, OFFSPRING, MUTANTS = 10, 28, 10
BIAS = 0.7
SEARCH_CUTS = 256
"""Places to cut while orders are compared; those found are then cut anywhere."""
FINALISTS = 3
"""Orders that are cut anywhere, the best of the search."""
MOST_WEIGHT = 3.0
"""The largest factor by which an estimate slows a machine; the smallest is its inverse."""
STALE_GENERATIONS = 40
"""Generations without a better candidate after which a search ends."""


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """How far a search has come."""

    generation: int
    bottleneck_s: float
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class FoundOrder:
    """The best slices that a search found."""

    slicing: Slicing
    machine_order: tuple[int, ...]
    """Index of the machine that has each of the slices."""
    kahn_s: float
    """Bottleneck of Kahn's order, with the machines in the order given."""
    generations: int


def search_orders(
    graph: OperationGraph,
    machines: Sequence[Machine],
    *,
    seed: int,
    budget_s: float = 10.0,
    max_generations: int = 10_000,
    crossover: Crossover = "biased",
    enough_s: float = 0.0,
    on_progress: Callable[[SearchProgress], None] | None = None,
    pair_rates_KK: Floats | None = None,
) -> FoundOrder:
    """Search for at most `budget_s` seconds, then slice the best orders exactly.

    The first candidates are Kahn's order, the graph's own and a depth-first one, so that the result
    is never worse than these; one with a bottleneck of `enough_s` seconds ends the search. The same
    seed and number of generations give the same result. `pair_rates_KK` are bytes/s between
    `machines`, symmetric (`nesa_node.sharding.pair_rates`). Raises `ConfigError` without pymoo, and
    `ValueError` for fewer machines than shares.
    """
    search = _Search(graph, machines, pair_rates_KK)
    given = tuple(range(len(machines)))
    even = np.ones(len(machines))
    known = [(search.slice(order, given, even), given) for order in search.known_orders]
    kahn_s = known[0][0].bottleneck_s
    if all(slicing.bottleneck_s > enough_s for slicing, _ in known):
        search.run(seed, budget_s, max_generations, crossover, enough_s, on_progress)
    found = [(search.slice(*each), each[1]) for each in search.finalists()]
    slicing, places = min((*known, *found), key=lambda each: each[0].bottleneck_s)
    return FoundOrder(slicing, places, kahn_s, search.generations)


_Candidate = tuple[Ints, tuple[int, ...], Floats]
"""An order of operations, one of machines, and weights of these."""


class _Search:
    def __init__(
        self, graph: OperationGraph, machines: Sequence[Machine], pair_rates_KK: Floats | None
    ) -> None:
        self._orders = OrderMaker(graph)
        own = np.arange(len(graph))
        known = self._orders.breadth_first(), own, self._orders.depth_first()
        self.known_orders = tuple(map(graph.gather, known))
        self.generations = 0
        self._graph = graph
        self._machines = machines
        self._pair_rates_KK = pair_rates_KK
        # Where all are alike, their order is no question.
        are_alike = len(set(machines)) == 1 and pair_rates_KK is None
        self._machine_keys = 0 if are_alike else len(machines)
        weight_keys = 0 if pair_rates_KK is None else len(machines)
        self.keys = len(graph) + self._machine_keys + weight_keys
        self._costs: dict[bytes, float] = {}
        self._best: list[tuple[float, _Candidate]] = []

    def run(
        self,
        seed: int,
        budget_s: float,
        max_generations: int,
        crossover: Crossover,
        enough_s: float,
        on_progress: Callable[[SearchProgress], None] | None,
    ) -> None:
        """Evolve keys."""
        began = time.monotonic()
        algorithm = _make_algorithm(self._first_keys(seed), crossover)
        from pymoo.core.problem import Problem

        def evaluate(keys_P: Floats, out: dict[str, Any], *_: Any, **__: Any) -> None:
            costs = []
            for keys in keys_P:
                late = time.monotonic() - began > budget_s
                costs.append(np.inf if late and self._costs else self._cost(keys))
            out["F"] = np.array(costs)

        problem = Problem(n_var=self.keys, n_obj=1, xl=0.0, xu=1.0)
        problem._evaluate = evaluate
        algorithm.setup(problem, termination=("n_gen", max_generations), seed=seed)
        best, stale = np.inf, 0
        while algorithm.has_next() and time.monotonic() - began < budget_s:
            algorithm.next()
            now = self._best[0][0]
            stale = 0 if now < best else stale + 1
            best = now
            self.generations += 1
            if on_progress is not None:
                on_progress(SearchProgress(self.generations, best, time.monotonic() - began))
            if stale >= STALE_GENERATIONS or best <= enough_s:
                break

    def slice(
        self,
        order: Ints,
        places: tuple[int, ...],
        weights_K: Floats,
        *,
        max_cuts: int | None = None,
    ) -> Slicing:
        """The slices of `order` for the machines in this order."""
        pairs = None
        if self._pair_rates_KK is not None:
            pairs = PairRates(self._pair_rates_KK[np.ix_(places, places)], weights_K)
        machines = [self._machines[each] for each in places]
        return slice_order(self._graph, order, machines, max_cuts=max_cuts, pairs=pairs)

    def finalists(self) -> list[_Candidate]:
        """The best different ones."""
        return [candidate for _, candidate in self._best]

    def _first_keys(self, seed: int) -> Floats:
        """Random keys, but for those of three orders: [P, N], with unequal machines [P, N + K], and
        with rates of pairs [P, N + 2 K].
        """
        count, machines = len(self._graph), self._machine_keys
        generator = np.random.default_rng(seed)
        keys_P = generator.random((ELITES + OFFSPRING + MUTANTS, self.keys))
        for keys, order in zip(keys_P, self.known_orders, strict=False):
            keys[order] = np.arange(count) / count
            keys[count : count + machines] = np.arange(machines) / max(1, machines)
            keys[count + machines :] = 0.5
        return keys_P

    def _cost(self, keys: Floats) -> float:
        count, machines = len(self._graph), self._machine_keys
        order = self._graph.gather(self._orders.by_keys(keys[:count].tolist()))
        places = tuple(np.argsort(keys[count : count + machines], kind="stable").tolist())
        places = places or tuple(range(len(self._machines)))
        weights_K = MOST_WEIGHT ** (2 * keys[count + machines :] - 1)
        known = sha256(order.tobytes() + repr(places).encode() + weights_K.tobytes()).digest()
        if known not in self._costs:
            slicing = self.slice(order, places, weights_K, max_cuts=SEARCH_CUTS)
            self._costs[known] = slicing.bottleneck_s
            self._best.append((slicing.bottleneck_s, (order, places, weights_K)))
            self._best = sorted(self._best, key=lambda each: each[0])[:FINALISTS]
        return self._costs[known]


def _make_algorithm(first_keys_P: Floats, crossover: Crossover) -> Any:
    try:
        from pymoo.algorithms.soo.nonconvex.brkga import BRKGA
        from pymoo.core.crossover import Crossover as PymooCrossover
    except ImportError as error:
        raise ConfigError(
            "a search of orders needs pymoo: pip install 'nesa-node[plan]' (the extra `plan`)"
        ) from error

    class Average(PymooCrossover):  # type: ignore[misc]
        """A share of one parent, the rest of the other: one share for all keys of a child."""

        def __init__(self) -> None:
            super().__init__(n_parents=2, n_offsprings=1, prob=1.0)

        def _do(self, _: Any, parents_2PK: Floats, *__: Any, random_state: Any, **___: Any) -> Any:
            share_P1 = random_state.random((parents_2PK.shape[1], 1))
            return (share_P1 * parents_2PK[0] + (1 - share_P1) * parents_2PK[1])[None]

    algorithm = BRKGA(
        n_elites=ELITES,
        n_offsprings=OFFSPRING,
        n_mutants=MUTANTS,
        bias=BIAS,
        sampling=first_keys_P,
    )
    if crossover == "arithmetic":
        algorithm.mating.crossover = Average()
    return algorithm
