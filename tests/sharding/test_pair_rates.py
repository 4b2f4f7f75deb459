"""Rates between pairs of machines: what blocks cost by them, and what the search makes of them."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest

from nesa_node.sharding.operation_graph import Floats, Machine, Operation, OperationGraph, Value
from nesa_node.sharding.order_search import search_orders
from nesa_node.sharding.pair_rates import PairRates, block_costs
from nesa_node.sharding.partition import find_partition
from nesa_node.sharding.slicing import slice_order
from tests.sharding.random_graphs import exhaustive_bottleneck_s, random_graph, random_machine


def random_rates(count: int, rng: random.Random) -> Floats:
    rates_KK = np.full((count, count), math.inf)
    for one, other in product(range(count), repeat=2):
        if one < other and rng.random() < 0.6:
            rates_KK[one, other] = rates_KK[other, one] = rng.choice([0.1, 0.5, 2])
    return rates_KK


def chain(sizes: list[float]) -> OperationGraph:
    """Operations of one second each, with one value from each to the next."""
    operations = tuple(Operation(f"op_{index}", "kernel", 1, 0) for index in range(len(sizes) + 1))
    values = tuple(Value(size, index, (index + 1,)) for index, size in enumerate(sizes))
    return OperationGraph(operations, values)


def test_a_value_passes_at_the_rate_of_its_pair() -> None:
    operations = tuple(Operation(f"op_{index}", "kernel", 1, 0) for index in range(3))
    values = (
        Value(6, None, (0, 2)),
        Value(12, 0, (1, 2)),
        Value(4, 1, (2,)),
        Value(10, 2, (), True),
    )
    graph = OperationGraph(operations, values)
    rates_KK = np.array([[math.inf, 3, 1], [3, math.inf, 100], [1, 100, math.inf]])
    costs = block_costs(graph, [[0], [1], [2]], [Machine(1, 1, 2)] * 3, rates_KK)
    assert [cost.receive_s for cost in costs] == [6 / 2, 12 / 2, 6 / 2 + 12 / 1 + 4 / 2]
    # To both of its users at the slower one's rate, and once.
    assert [cost.send_s for cost in costs] == [12 / 1, 4 / 2, 10 / 2]
    together = block_costs(graph, [[0, 1], [], [2]], [Machine(1, 1, 2)] * 3, rates_KK)
    assert [cost.receive_s for cost in together] == [6 / 2, 0, 6 / 2 + 12 / 1 + 4 / 1]


def test_rates_that_slow_nothing_change_nothing() -> None:
    matches = 0
    for seed in range(5):
        rng = random.Random(seed)
        graph = random_graph(9, rng)
        machines = [replace(random_machine(rng), fast_memory_bytes=math.inf) for _ in range(3)]
        best = exhaustive_bottleneck_s(graph, machines)
        rates_KK = np.full((3, 3), math.inf)
        found = search_orders(graph, machines, seed=1, budget_s=60, pair_rates_KK=rates_KK)
        assert found.slicing.bottleneck_s >= best * (1 - 1e-9)
        matches += found.slicing.bottleneck_s <= best * (1 + 1e-9)
    assert matches >= 4


def test_machines_far_apart_are_no_neighbours() -> None:
    """Two in each of two buildings: values pass between the buildings once, where fewest do."""
    graph = chain([50, 0.1, 50])
    rates_KK = np.full((4, 4), 1.0)
    for pair in ((0, 2), (1, 3)):
        rates_KK[pair] = rates_KK[pair[::-1]] = 1000.0
    found = find_partition(
        graph, [Machine(1, 1, 1000)] * 4, seed=0, budget_s=30, pair_rates_KK=rates_KK
    )
    homes = [piece.machine for piece in found.pieces if piece.operations]
    assert {tuple(sorted(homes[:2])), tuple(sorted(homes[2:]))} == {(0, 2), (1, 3)}
    assert found.bottleneck_s == pytest.approx(1 + 50 / 1000 + 0.1)


def test_what_the_network_gets_and_gives_passes_no_pair() -> None:
    """One machine alone is best, however slow the way to the other one is."""
    operations = tuple(Operation(f"op_{index}", "kernel", 1, 0) for index in range(2))
    values = (Value(1000, None, (0,)), Value(10, 0, (1,)), Value(1000, 1, (), True))
    graph = OperationGraph(operations, values)
    rates_KK = np.array([[math.inf, 1], [1, math.inf]])
    fast, slow = Machine(10, 1e9, 1000), Machine(0.1, 1e9, 1000)
    for machines in ([fast, slow], [slow, fast]):
        found = slice_order(graph, np.arange(2), machines, pairs=PairRates.of(rates_KK))
        assert found.bottleneck_s == pytest.approx(0.2 + 2)


def exhaustive_by_pairs_s(
    graph: OperationGraph, machines: list[Machine], rates_KK: Floats
) -> float:
    """Of all partitions with an acyclic quotient, on all machines."""
    best = math.inf
    edges = {
        (value.producer, each)
        for value in graph.values
        if value.producer is not None
        for each in value.consumers
    }
    for homes in product(range(len(machines)), repeat=len(graph)):
        if any(homes[one] > homes[other] for one, other in edges):
            continue
        blocks = [
            [each for each in range(len(graph)) if homes[each] == place]
            for place in range(len(machines))
        ]
        for places in permutations(range(len(machines))):
            costs = block_costs(
                graph, blocks, [machines[each] for each in places], rates_KK[np.ix_(places, places)]
            )
            best = min(best, max(cost.total_s for cost in costs))
    return best


@pytest.mark.timeout(180)
def test_small_graphs_with_pairs_are_solved() -> None:
    matches = 0
    for seed in range(20):
        rng = random.Random(seed)
        graph = random_graph(rng.randint(3, 6), rng)
        kinds = [random_machine(rng) for _ in range(2)]
        machines = [
            Machine(kind.flop_per_s, 1e9, kind.link_bytes_per_s)
            for kind in (rng.choice(kinds) for _ in range(3))
        ]
        rates_KK = random_rates(3, rng)
        best = exhaustive_by_pairs_s(graph, machines, rates_KK)
        found = find_partition(graph, machines, seed=seed, budget_s=60, pair_rates_KK=rates_KK)
        assert found.bound_s <= best * (1 + 1e-9)
        assert found.bottleneck_s >= best * (1 - 1e-9)
        matches += found.bottleneck_s <= best * (1 + 1e-9)
    assert matches >= 18
