"""A time that no partition's slowest block can be faster than.

Let T be the bottleneck of a partition. An operation's block cannot hold another one if the
operations on the paths between both take longer than T, as blocks are convex: so its block is cut
off before all of these, and what passes such a cut is at least a minimum cut c_v of the graph. Its
block then has at most T - c_v seconds of work. Each operation counts with the share of its block's
work that it is, w_v / (T - c_v) at least, and all shares together are the number of blocks. The
least T for which they are no more than the machines is the bound: it holds for all partitions with
an acyclic quotient, whether or not they are slices of an order.

N operations, K machines.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from nesa_node.sharding.operation_graph import Floats, Ints, Machine, OperationGraph

MAX_CUTS = 200
"""Operations for which a minimum cut is made, those with most work: of the rest none is assumed."""
_STEPS = 12
"""Halvings of the interval in which the bound is: to a four-thousandth."""
_UNCUT = 10**9
"""Capacity that no cut has."""


def lower_bound_s(graph: OperationGraph, machines: Sequence[Machine]) -> float:
    """Seconds below the slowest block of each partition among `machines`."""
    return _Bound(graph, machines).find()


class _Bound:
    def __init__(self, graph: OperationGraph, machines: Sequence[Machine]) -> None:
        self._graph = graph
        self._machines = machines
        works_KN = np.array([machine.work_s(graph) for machine in machines])
        self._work_N = works_KN.min(axis=0)
        """Of the fastest machine for each operation."""
        ratios_KN = np.ones_like(works_KN)
        np.divide(self._work_N, works_KN, out=ratios_KN, where=works_KN > 0)
        self._speed = float(ratios_KN.max(axis=1).sum())
        """Machines, each as a share of one that is the fastest for all operations."""
        self._link = max(machine.link_bytes_per_s for machine in machines)
        self._heavy = np.argsort(-self._work_N)[:MAX_CUTS]
        self._between = _work_between(graph, self._work_N, self._heavy)
        size = sum(value.size_bytes for value in graph.values)
        self._unit = max(size * 4 / _UNCUT, 1e-12)
        """Bytes of one unit of capacity."""

    def find(self) -> float:
        low = max(self._of_sums(), self._of_single_operations())
        if not low:
            return 0.0
        high = low
        while not self._is_possible(high):
            low, high = high, 2 * high
        for _ in range(_STEPS):
            middle = (low + high) / 2
            if self._is_possible(middle):
                high = middle
            else:
                low = middle
        return low

    def _of_sums(self) -> float:
        """Of all work and all parameters that must be streamed, on all machines together."""
        stream = max(machine.stream_bytes_per_s for machine in self._machines)
        fitting = sum(machine.fast_memory_bytes for machine in self._machines)
        beyond = max(0.0, self._graph.total_parameter_bytes - fitting)
        count = len(self._machines)
        return max(float(self._work_N.sum()) / self._speed, beyond / stream / count)

    def _of_single_operations(self) -> float:
        most = 0.0
        room = max(machine.fast_memory_bytes for machine in self._machines)
        stream = max(machine.stream_bytes_per_s for machine in self._machines)
        for operation, work_s in zip(self._graph.operations, self._work_N, strict=True):
            held = sum(self._graph.parameter_bytes[each] for each in operation.parameters)
            most = max(most, float(work_s) + max(0.0, held - room) / stream)
        return most

    def _is_possible(self, bottleneck_s: float) -> bool:
        """Whether shares of blocks leave a bottleneck of `bottleneck_s` possible."""
        moved_N = np.zeros(len(self._graph))
        for row, operation in enumerate(self._heavy):
            far = self._between[row] > bottleneck_s
            moved_N[operation] = self._least_bytes(int(operation), far) / self._link
        left_N = bottleneck_s - moved_N
        if (left_N < self._work_N).any():
            return False
        busy = self._work_N > 0
        return float((self._work_N[busy] / left_N[busy]).sum()) <= self._speed * (1 + 1e-12)

    def _least_bytes(self, operation: int, far_N: npt.NDArray[np.bool_]) -> float:
        """What passes at least between a set with `operation`, without those of `far_N`, and the
        rest: a minimum cut, in which `operation` is the source and `far_N` are one sink.
        """
        graph = self._graph
        count = len(graph)
        sink = count
        node_of = np.where(far_N, sink, np.arange(count))
        edges: dict[tuple[int, int], int] = {}
        helper = count + 1

        def join(start: int, end: int, capacity: int) -> None:
            if start != end:
                edges[start, end] = min(_UNCUT, edges.get((start, end), 0) + capacity)

        for value in graph.values:
            producer = sink if value.producer is None else int(node_of[value.producer])
            consumers = {int(node_of[each]) for each in value.consumers}
            users = consumers | ({sink} if value.is_output else set())
            size = int(value.size_bytes / self._unit)
            if users == {producer} or not size:
                continue
            if producer != sink:
                join(producer, helper, size)
                for user in users:
                    join(helper, user, _UNCUT)
                helper += 1
            for user in consumers - {sink, producer}:
                join(user, helper, _UNCUT)
            join(helper, producer, size)
            helper += 1
        if not edges:
            return 0.0
        starts, ends = np.array(list(edges)).T
        capacity = np.array(list(edges.values()), dtype=np.int32)
        network = csr_array((capacity, (starts, ends)), shape=(helper, helper))
        return float(maximum_flow(network, operation, sink).flow_value) * self._unit


def _work_between(graph: OperationGraph, work_N: Floats, chosen: Ints) -> Floats:
    """For each operation of `chosen` and each other one, the work of those on the paths between
    them, both included; nothing where there is no path.
    """
    count = len(graph)
    reaches = np.zeros((count, count), dtype=bool)
    for operation in reversed(range(count)):
        reaches[operation, operation] = True
        for index in graph.outputs[operation]:
            for consumer in graph.values[index].consumers:
                reaches[operation] |= reaches[consumer]
    between = np.zeros((len(chosen), count))
    for row, operation in enumerate(chosen):
        after = reaches[operation]
        before = reaches[:, operation]
        # Of a later operation: what both it is reached from and `operation` reaches.
        between[row, after] = (work_N[after, None] * reaches[np.ix_(after, after)]).sum(axis=0)
        between[row, before] = (reaches[np.ix_(before, before)] * work_N[before]).sum(axis=1)
    return between
