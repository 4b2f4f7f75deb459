"""Made-up graphs, and the best partition of one by trying all."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import permutations

from nesa_node.sharding.operation_graph import (
    Machine,
    Operation,
    OperationGraph,
    Value,
    block_cost,
)


def random_graph(count: int, rng: random.Random, *, fan_out: float = 2.0) -> OperationGraph:
    """`count` operations with some parameters, a few of them shared."""
    sizes = tuple(rng.choice([0, 10, 50, 200]) for _ in range(max(1, count // 2)))
    operations = []
    for index in range(count):
        used = rng.sample(range(len(sizes)), rng.choice([0, 1, 1, min(2, len(sizes))]))
        work = rng.random() * 100
        operations.append(Operation(f"op_{index}", "kernel", work, 0.0, tuple(sorted(used))))
    values = []
    for producer in (None, *range(count)):
        later = range(0 if producer is None else producer + 1, count)
        share = min(1.0, fan_out / max(1, len(later)))
        consumers = tuple(each for each in later if rng.random() < share)
        is_output = producer is not None and (not consumers or rng.random() < 0.1)
        values.append(Value(rng.randint(0, 60), producer, consumers, is_output))
    return OperationGraph(tuple(operations), tuple(values), sizes)


def random_machine(rng: random.Random) -> Machine:
    return Machine(
        flop_per_s=rng.choice([1, 2, 4]),
        moved_bytes_per_s=1e9,
        link_bytes_per_s=rng.choice([0.5, 1, 4]),
        fast_memory_bytes=rng.choice([math.inf, 100, 30]),
        stream_bytes_per_s=rng.choice([1, 5]),
    )


def all_orders(graph: OperationGraph) -> Iterator[tuple[int, ...]]:
    """Each order in which the operations can run."""
    before: list[set[int]] = [set() for _ in graph.operations]
    for value in graph.values:
        for consumer in value.consumers:
            if value.producer is not None:
                before[consumer].add(value.producer)

    def extend(done: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(done) == len(graph):
            yield done
        for each in range(len(graph)):
            if each not in done and before[each].issubset(done):
                yield from extend((*done, each))

    return extend(())


def exhaustive_bottleneck_s(graph: OperationGraph, machines: Sequence[Machine]) -> float:
    """The slowest block of the best partition, over all with an acyclic quotient.

    Blocks are differences of nested sets that contain what they use. Of machines with a limited
    memory the order within a block counts, too, so that they are not allowed here.
    """
    assert all(machine.fast_memory_bytes == math.inf for machine in machines)
    count = len(graph)
    closed = _closed_sets(graph)
    members = {each: [i for i in range(count) if each >> i & 1] for each in range(1 << count)}
    costs = {
        (inner, outer, machine): block_cost(graph, members[outer & ~inner], machine).total_s
        for outer in closed
        for inner in closed
        if outer & inner == inner != outer
        for machine in set(machines)
    }
    best = math.inf
    for order in set(permutations(machines)):
        slowest = {0: 0.0}
        for machine in order:
            following = dict(slowest)
            for inner, until in slowest.items():
                for outer in closed:
                    if outer & inner == inner != outer:
                        now = max(until, costs[inner, outer, machine])
                        following[outer] = min(following.get(outer, math.inf), now)
            slowest = following
        best = min(best, slowest[(1 << count) - 1])
    return best


def _closed_sets(graph: OperationGraph) -> list[int]:
    """Sets of operations, as bits, that contain what they use."""
    needs = [0] * len(graph)
    for value in graph.values:
        for consumer in value.consumers:
            if value.producer is not None:
                needs[consumer] |= 1 << value.producer
    found = {0}
    for index, needed in enumerate(needs):
        found |= {each | 1 << index for each in found if each & needed == needed}
    return sorted(found)
