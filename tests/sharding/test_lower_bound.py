"""No partition is faster than the bound, which of narrow graphs is what the best one takes."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from nesa_node.sharding import lower_bound
from nesa_node.sharding.lower_bound import lower_bound_s
from nesa_node.sharding.operation_graph import Machine, Operation, OperationGraph, Value
from nesa_node.sharding.slicing import slice_order
from tests.sharding.random_graphs import exhaustive_bottleneck_s, random_graph, random_machine


def _small(seed: int) -> tuple[OperationGraph, list[Machine], float]:
    """A graph, machines, and the best bottleneck."""
    rng = random.Random(seed)
    graph = random_graph(rng.randint(1, 9), rng)
    kinds = [replace(random_machine(rng), fast_memory_bytes=math.inf) for _ in range(2)]
    machines = [rng.choice(kinds) for _ in range(rng.randint(1, 4))]
    return graph, machines, exhaustive_bottleneck_s(graph, machines)


def test_equal_machines_reach_it() -> None:
    """All sets of so few operations are compared, so that it is the optimum."""
    reached = 0
    for seed in range(40):
        graph, machines, best = _small(seed)
        machines = [machines[0]] * len(machines)
        best = exhaustive_bottleneck_s(graph, machines)
        bound = lower_bound_s(graph, machines, 2 * best)
        assert bound <= best * (1 + 1e-6)
        reached += bound >= best * 0.999
    assert reached == 40


def test_unequal_machines_never_beat_it() -> None:
    for seed in range(100, 140):
        graph, machines, best = _small(seed)
        assert lower_bound_s(graph, machines, best) <= best * (1 + 1e-6)


@pytest.mark.parametrize("most", [3, 6, 12])
def test_fewer_sets_give_a_lower_bound(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations that are left out count with their work."""
    monkeypatch.setattr(lower_bound, "MAX_SETS", most)
    for seed in range(200, 240):
        graph, machines, _ = _small(seed)
        machines = [machines[0]] * len(machines)
        best = exhaustive_bottleneck_s(graph, machines)
        bound = lower_bound_s(graph, machines, 2 * best)
        work = machines[0].work_s(graph)
        assert bound <= best * (1 + 1e-6)
        assert bound >= max(work.sum() / len(machines), work.max()) * (1 - 1e-6)


def test_memories_count() -> None:
    operations = tuple(Operation(f"op_{index}", "k", 1, 0, (index,)) for index in range(4))
    values = tuple(Value(0, index, (index + 1,)) for index in range(3))
    graph = OperationGraph(operations, values, (100.0,) * 4)
    machine = Machine(1, 1, 1, fast_memory_bytes=150, stream_bytes_per_s=10)
    # Two hold 300 of 400 bytes, and read the rest again.
    bound = lower_bound_s(graph, [machine] * 2, 100)
    best = slice_order(graph, np.arange(4), [machine] * 2).bottleneck_s
    assert bound == pytest.approx(best, rel=1e-3)
    assert bound == pytest.approx(2 + 5, rel=1e-3)


def test_a_chain_of_layers_is_solved() -> None:
    """Transfers count, which the sum of all work over the machines leaves out."""
    rng = random.Random(1)
    operations = tuple(
        Operation(f"op_{index}", "k", 5 + 10 * rng.random(), 0) for index in range(60)
    )
    values = (
        Value(3, None, (0,)),
        *(Value(4, index, (index + 1,)) for index in range(59)),
        Value(1, 59, (), is_output=True),
    )
    graph = OperationGraph(operations, values)
    machines = [Machine(1, 1, 0.5)] * 6
    best = slice_order(graph, np.arange(60), machines).bottleneck_s
    assert lower_bound_s(graph, machines, 3 * best) == pytest.approx(best, rel=1e-3)


def test_two_towers_share_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are compared, each in a group of its own, and what both use counts once."""
    monkeypatch.setattr(lower_bound, "MAX_SETS", 20)
    operations = tuple(Operation(f"op_{index}", "k", 10, 0) for index in range(20))
    values = [Value(50, None, (0, 10))]
    for start in (0, 10):
        chain = range(start, start + 9)
        values += [Value(8, index, (index + 1,)) for index in chain]
        values.append(Value(1, start + 9, (), is_output=True))
    graph = OperationGraph(operations, tuple(values))
    machines = [Machine(1, 1, 1)] * 3
    orders = [list(range(20)), np.arange(20).reshape(2, 10).T.flatten().tolist()]
    best = min(slice_order(graph, np.array(order), machines).bottleneck_s for order in orders)
    bound = lower_bound_s(graph, machines, 2 * best)
    assert 0.8 * best < bound <= best * (1 + 1e-6)
    assert bound > (20 * 10 + 50) / 3


def test_a_whole_tower_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where links are slow, what one tower's cheapest cut takes is as fast as all can be."""
    monkeypatch.setattr(lower_bound, "MAX_SETS", 40)
    rng = random.Random(1)
    operations = tuple(Operation(f"op_{index}", "k", rng.uniform(8, 12), 0) for index in range(60))
    values = []
    for start in (0, 30):
        values += [
            Value(rng.uniform(40, 200), index, (index + 1,)) for index in range(start, start + 29)
        ]
        values.append(Value(1, start + 29, (), is_output=True))
    graph = OperationGraph(operations, tuple(values))
    machines = [Machine(1, 1, 1)] * 12
    best = slice_order(graph, np.arange(60), machines).bottleneck_s
    assert lower_bound_s(graph, machines, 2 * best) == pytest.approx(best, rel=1e-3)
