"""The search finds the best of all partitions of small graphs, and the bound is below it."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from nesa_node.sharding.lower_bound import lower_bound_s
from nesa_node.sharding.operation_graph import (
    Machine,
    Operation,
    OperationGraph,
    Value,
    block_cost,
)
from nesa_node.sharding.order_search import SearchProgress, search_orders
from nesa_node.sharding.slicing import slice_order
from tests.sharding.random_graphs import (
    all_orders,
    exhaustive_bottleneck_s,
    random_graph,
    random_machine,
)


def _count_matches(seeds: range) -> int:
    """In how many graphs the search is as good as trying all; the bound holds in each."""
    matches = 0
    for seed in seeds:
        rng = random.Random(seed)
        graph = random_graph(rng.randint(2, 12), rng)
        kinds = [replace(random_machine(rng), fast_memory_bytes=math.inf) for _ in range(2)]
        machines = [rng.choice(kinds) for _ in range(rng.randint(1, 4))]
        best = exhaustive_bottleneck_s(graph, machines)
        found = search_orders(graph, machines, seed=seed, budget_s=60)
        assert lower_bound_s(graph, machines, best) <= best * (1 + 1e-9)
        assert found.slicing.bottleneck_s >= best * (1 - 1e-9)
        matches += found.slicing.bottleneck_s <= best * (1 + 1e-9)
    return matches


@pytest.mark.timeout(120)
def test_small_graphs_are_solved() -> None:
    assert _count_matches(range(8)) >= 7


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_300_small_graphs_are_solved() -> None:
    assert _count_matches(range(100, 400)) >= 285


def test_a_slow_machine_gets_the_small_end() -> None:
    operations = tuple(Operation(f"op_{work}", "kernel", work, 0) for work in (1, 10, 10))
    values = (Value(1, 0, (1,)), Value(1, 1, (2,)))
    machines = [Machine(10, 1, 100), Machine(10, 1, 100), Machine(1, 1, 100)]
    found = search_orders(OperationGraph(operations, values), machines, seed=0, budget_s=60)
    assert found.machine_order[0] == 2
    assert found.slicing.bottleneck_s == pytest.approx(1.02)


def test_small_memories_are_filled_well() -> None:
    """Where the order within a block counts, too."""
    for seed in range(5):
        rng = random.Random(seed)
        graph = random_graph(6, rng)
        machines = [random_machine(rng)] * 3
        best = min(
            slice_order(graph, np.array(order), machines).bottleneck_s
            for order in all_orders(graph)
        )
        found = search_orders(graph, machines, seed=0, budget_s=60)
        assert found.slicing.bottleneck_s == pytest.approx(best)
        assert lower_bound_s(graph, machines, best) <= best * (1 + 1e-9)


@pytest.mark.parametrize("crossover", ["biased", "arithmetic"])
def test_a_search_is_repeatable(crossover: str) -> None:
    graph = random_graph(60, random.Random(1))
    machines = [Machine(1, 1e9, 2), Machine(3, 1e9, 1), Machine(1, 1e9, 2)]
    seen: list[SearchProgress] = []
    found = [
        search_orders(
            graph,
            machines,
            seed=5,
            budget_s=600,
            max_generations=4,
            crossover=crossover,  # type: ignore[arg-type]
            on_progress=seen.append,
        )
        for _ in range(2)
    ]
    first, second = found
    assert first.slicing.ends == second.slicing.ends
    assert first.slicing.order.tolist() == second.slicing.order.tolist()
    assert first.machine_order == second.machine_order
    assert first.slicing.bottleneck_s <= first.kahn_s
    assert len(seen) == 8
    assert seen[0].bottleneck_s >= seen[3].bottleneck_s
    blocks = zip(first.slicing.blocks(), first.machine_order, strict=True)
    costs = [block_cost(graph, block, machines[place]).total_s for block, place in blocks]
    assert max(costs) == pytest.approx(first.slicing.bottleneck_s)


def test_a_search_ends_with_what_is_enough() -> None:
    graph = random_graph(60, random.Random(1))
    machines = [Machine(1, 1e9, 2)] * 4
    best = search_orders(graph, machines, seed=5, budget_s=600, max_generations=9)
    enough = 1.0001 * best.slicing.bottleneck_s
    found = search_orders(graph, machines, seed=5, budget_s=600, enough_s=enough)
    assert 0 < found.generations <= best.generations
    assert found.slicing.bottleneck_s <= enough
    assert not search_orders(graph, machines, seed=5, budget_s=600, enough_s=1e9).generations


def test_a_search_ends_in_time() -> None:
    graph = random_graph(300, random.Random(2))
    found = search_orders(graph, [Machine(1, 1e9, 2)] * 4, seed=0, budget_s=0.01)
    assert found.slicing.bottleneck_s <= found.kahn_s
