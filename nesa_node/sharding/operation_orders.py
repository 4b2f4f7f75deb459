"""Orders in which the operations of a graph can run.

N operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from nesa_node.sharding.operation_graph import Ints, OperationGraph


class OrderMaker:
    """Makes orders of one graph by Kahn's algorithm: of the operations whose inputs are there, that
    with the least key comes next.
    """

    def __init__(self, graph: OperationGraph) -> None:
        after: list[set[int]] = [set() for _ in graph.operations]
        for value in graph.values:
            if value.producer is not None:
                after[value.producer].update(value.consumers)
        self._after = [sorted(each) for each in after]
        self._waits_for = np.bincount(
            [each for consumers in self._after for each in consumers], minlength=len(graph)
        ).tolist()

    def by_keys(self, keys_N: Sequence[float]) -> Ints:
        """The order [N] of least keys first."""
        waits_for = list(self._waits_for)
        ready = [(keys_N[each], each) for each, count in enumerate(waits_for) if not count]
        ready.sort()
        order = []
        while ready:
            _, operation = heappop(ready)
            order.append(operation)
            for each in self._after[operation]:
                waits_for[each] -= 1
                if not waits_for[each]:
                    heappush(ready, (keys_N[each], each))
        return np.array(order)

    def breadth_first(self) -> Ints:
        """Kahn's order: operations in the order in which their inputs were there."""
        waits_for = list(self._waits_for)
        order = [each for each, count in enumerate(waits_for) if not count]
        for operation in order:
            for each in self._after[operation]:
                waits_for[each] -= 1
                if not waits_for[each]:
                    order.append(each)
        return np.array(order)

    def depth_first(self) -> Ints:
        """Operations as soon after what they use as can be: few values wait at a time."""
        waits_for = list(self._waits_for)
        stack = [each for each, count in enumerate(waits_for) if not count][::-1]
        order = []
        while stack:
            operation = stack.pop()
            order.append(operation)
            for each in reversed(self._after[operation]):
                waits_for[each] -= 1
                if not waits_for[each]:
                    stack.append(each)
        return np.array(order)
