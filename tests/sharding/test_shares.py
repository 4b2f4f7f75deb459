"""Networks of a pipeline in one graph: cuts, searches and bounds, against trying all."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, combinations_with_replacement

import numpy as np
import pytest

from nesa_node.core.errors import ConfigError
from nesa_node.sharding.lower_bound import lower_bound_s
from nesa_node.sharding.operation_graph import Machine, OperationGraph, Share, Value, block_cost
from nesa_node.sharding.operation_orders import OrderMaker
from nesa_node.sharding.order_search import search_orders
from nesa_node.sharding.partition import find_partition
from nesa_node.sharding.slicing import slice_order
from tests.sharding.random_graphs import exhaustive_bottleneck_s, random_graph, random_machine


def join(one: OperationGraph, other: OperationGraph, runs: tuple[int, int]) -> OperationGraph:
    """Both beside each other, their operations alternating at first."""
    few = min(len(one), len(other))
    places = [2 * index if index < few else few + index for index in range(len(one))]
    taken = set(places)
    rest = [index for index in range(len(one) + len(other)) if index not in taken]
    parameters = len(one.parameter_bytes)
    operations = {
        **dict(zip(places, one.operations, strict=True)),
        **{
            place: replace(each, parameters=tuple(index + parameters for index in each.parameters))
            for place, each in zip(rest, other.operations, strict=True)
        },
    }
    return OperationGraph(
        tuple(operations[index] for index in range(len(operations))),
        (*_moved(one, places), *_moved(other, rest)),
        (*one.parameter_bytes, *other.parameter_bytes),
        (Share(tuple(places), runs[0]), Share(tuple(rest), runs[1])),
    )


def _moved(graph: OperationGraph, places: list[int]) -> Iterator[Value]:
    for value in graph.values:
        producer = None if value.producer is None else places[value.producer]
        yield replace(
            value, producer=producer, consumers=tuple(places[each] for each in value.consumers)
        )


def alone(graph: OperationGraph, runs: int) -> OperationGraph:
    return replace(graph, shares=(Share(tuple(range(len(graph))), runs),))


@pytest.mark.parametrize("seed", range(6))
def test_no_other_slices_are_better(seed: int) -> None:
    """Of machines with little memory, too, where each run reads weights again."""
    rng = random.Random(seed)
    graph = join(random_graph(5, rng), random_graph(7, rng), (1, 3))
    machines = [random_machine(rng) for _ in range(4)]
    order = graph.gather(OrderMaker(graph).by_keys([rng.random() for _ in range(12)]))
    best = math.inf
    for ends in combinations_with_replacement(range(13), 3):
        blocks = [
            order[start:end].tolist() for start, end in zip((0, *ends), (*ends, 12), strict=True)
        ]
        if all(len({graph.share_of[each] for each in block}) < 2 for block in blocks):
            costs = [block_cost(graph, *each) for each in zip(blocks, machines, strict=True)]
            best = min(best, max(cost.total_s for cost in costs))
    found = slice_order(graph, order, machines)
    assert found.bottleneck_s == pytest.approx(best)
    costs = [block_cost(graph, *each) for each in zip(found.blocks(), machines, strict=True)]
    assert max(cost.total_s for cost in costs) == pytest.approx(best)


def test_costs_are_those_of_all_runs() -> None:
    graph = random_graph(6, random.Random(3))
    machine = Machine(2, 1e9, 1, fast_memory_bytes=30, stream_bytes_per_s=5)
    once, often = (block_cost(alone(graph, runs), [1, 2, 3], machine) for runs in (1, 7))
    assert often.total_s == pytest.approx(7 * once.total_s)
    assert (often.peak_bytes, often.parameter_bytes) == (once.peak_bytes, once.parameter_bytes)


def best_of_all_s(one: OperationGraph, other: OperationGraph, machines: list[Machine]) -> float:
    """Over all ways to divide the machines among both networks."""
    best = math.inf
    for count in range(1, len(machines)):
        for chosen in combinations(range(len(machines)), count):
            mine = [machines[index] for index in chosen]
            rest = [each for index, each in enumerate(machines) if index not in chosen]
            slowest = max(exhaustive_bottleneck_s(one, mine), exhaustive_bottleneck_s(other, rest))
            best = min(best, slowest)
    return best


@pytest.mark.timeout(180)
def test_small_pipelines_are_solved() -> None:
    matches = 0
    for seed in range(6):
        rng = random.Random(seed)
        one, other = random_graph(rng.randint(2, 6), rng), random_graph(rng.randint(2, 6), rng)
        kinds = [replace(random_machine(rng), fast_memory_bytes=math.inf) for _ in range(2)]
        machines = [rng.choice(kinds) for _ in range(3)]
        best = best_of_all_s(alone(one, 1), alone(other, 4), machines)
        graph = join(one, other, (1, 4))
        assert lower_bound_s(graph, machines, best) <= best * (1 + 1e-9)
        found = search_orders(graph, machines, seed=seed, budget_s=60).slicing
        assert found.bottleneck_s >= best * (1 - 1e-9)
        for block in found.blocks():
            assert len({graph.share_of[each] for each in block}) < 2
        matches += found.bottleneck_s <= best * (1 + 1e-9)
    assert matches >= 5


def test_a_bound_knows_that_networks_have_machines_of_their_own() -> None:
    graph = join(random_graph(4, random.Random(1)), random_graph(40, random.Random(2)), (1, 100))
    machines = [Machine(1, 1e12, 1e12)] * 3
    works = [
        sum(graph.operations[each].flop for each in share.operations) * share.runs
        for share in graph.shares
    ]
    best = search_orders(graph, machines, seed=0, budget_s=20).slicing.bottleneck_s
    assert max(works) / 2 <= lower_bound_s(graph, machines, best) <= best


def test_a_pipeline_needs_machines() -> None:
    graph = join(random_graph(3, random.Random(1)), random_graph(3, random.Random(2)), (1, 2))
    machine = random_machine(random.Random(3))
    with pytest.raises(ConfigError, match="1 machines: a pipeline of 2 networks"):
        find_partition(graph, [machine], seed=0, budget_s=1)
    with pytest.raises(ValueError, match="2 or more are needed"):
        slice_order(graph, graph.gather(np.arange(6)), [machine])
    with pytest.raises(ValueError, match="operations of a share are apart"):
        slice_order(graph, np.arange(6), [machine] * 2)


@pytest.mark.parametrize("shares", [((0, 1), (1, 2)), ((0, 1),), ((0, 1), (2, 3)), ((0,), (1, 2))])
def test_shares_have_each_operation_once(shares: tuple[tuple[int, ...], ...]) -> None:
    graph = random_graph(3, random.Random(0), fan_out=9)
    with pytest.raises(ValueError, match="share"):
        replace(graph, shares=tuple(Share(each, 1) for each in shares))
