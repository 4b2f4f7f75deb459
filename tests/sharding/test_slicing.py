"""Slices of an order are the best ones: compared with all."""

from __future__ import annotations

import random
from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nesa_node.sharding.operation_graph import block_cost
from nesa_node.sharding.operation_orders import OrderMaker
from nesa_node.sharding.slicing import slice_order
from tests.sharding.random_graphs import random_graph, random_machine


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 4))
def test_no_other_slices_are_better(seed: int, count: int, machines: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(count, rng)
    kinds = [random_machine(rng) for _ in range(2)]
    chosen = [rng.choice(kinds) for _ in range(machines)]
    order = OrderMaker(graph).by_keys([rng.random() for _ in range(count)])
    best = min(
        max(
            block_cost(graph, order[start:end].tolist(), machine).total_s
            for start, end, machine in zip((0, *ends), (*ends, count), chosen, strict=True)
        )
        for ends in combinations_with_replacement(range(count + 1), machines - 1)
    )

    found = slice_order(graph, order, chosen)

    assert found.bottleneck_s == pytest.approx(best)
    costs = [block_cost(graph, *each) for each in zip(found.blocks(), chosen, strict=True)]
    assert max(cost.total_s for cost in costs) == pytest.approx(best)
    assert [each for block in found.blocks() for each in block] == order.tolist()


def test_fewer_cuts_are_nearly_as_good() -> None:
    graph = random_graph(400, random.Random(1))
    machine = random_machine(random.Random(2))
    order = OrderMaker(graph).depth_first()
    best = slice_order(graph, order, [machine] * 5)
    few = slice_order(graph, order, [machine] * 5, max_cuts=50)
    assert best.bottleneck_s <= few.bottleneck_s < 1.2 * best.bottleneck_s


def test_a_first_solution_does_not_hide_better_ones() -> None:
    """Graphs with more operations than a coarse solution has places to cut."""
    graph = random_graph(700, random.Random(3))
    machines = [random_machine(random.Random(4))] * 7
    order = OrderMaker(graph).breadth_first()
    every = slice_order(graph, order, machines, max_cuts=len(graph))
    assert slice_order(graph, order, machines).bottleneck_s == pytest.approx(every.bottleneck_s)


def test_what_is_no_order() -> None:
    graph = random_graph(5, random.Random(0))
    machine = random_machine(random.Random(0))
    with pytest.raises(ValueError, match="no machines"):
        slice_order(graph, np.arange(5), [])
    with pytest.raises(ValueError, match="an order of 4"):
        slice_order(graph, np.arange(4), [machine])
    with pytest.raises(ValueError, match="before it is made"):
        slice_order(graph, np.arange(5)[::-1], [machine])
