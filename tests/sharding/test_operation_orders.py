"""Orders of operations use nothing before it is made."""

from __future__ import annotations

import random

from nesa_node.sharding.operation_graph import OperationGraph
from nesa_node.sharding.operation_orders import OrderMaker
from tests.sharding.random_graphs import all_orders, random_graph


def test_orders_can_run() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        graph = random_graph(rng.randint(1, 40), rng)
        maker = OrderMaker(graph)
        keys = [rng.random() for _ in range(len(graph))]
        for order in (maker.by_keys(keys), maker.breadth_first(), maker.depth_first()):
            _assert_runs(graph, order.tolist())


def test_keys_reach_each_order() -> None:
    rng = random.Random(5)
    graph = random_graph(6, rng)
    maker = OrderMaker(graph)
    for wanted in all_orders(graph):
        keys = [0.0] * len(graph)
        for place, operation in enumerate(wanted):
            keys[operation] = place / len(graph)
        assert tuple(maker.by_keys(keys).tolist()) == wanted


def _assert_runs(graph: OperationGraph, order: list[int]) -> None:
    assert sorted(order) == list(range(len(graph)))
    place = {operation: position for position, operation in enumerate(order)}
    for value in graph.values:
        if value.producer is not None:
            assert all(place[value.producer] < place[each] for each in value.consumers)
