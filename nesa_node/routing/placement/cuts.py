"""Numbers of blocks per node of a pipeline, for given nodes."""

from __future__ import annotations

import heapq

import numpy as np

from nesa_node.routing.problem import Floats, Ints


def quickest_cuts(most_P: Ints, block_s_P: Floats, num_blocks: int) -> Ints:
    """The numbers of blocks [P] that minimise the time of a step.

    Every node runs at least one block; the rest goes to the fastest nodes, as many as fit. Raises
    `ValueError` if the blocks do not fit, or are fewer than the nodes.
    """
    _check(most_P, num_blocks)
    lengths_P = np.ones(len(most_P), dtype=np.int64)
    left = num_blocks - len(most_P)
    for node in np.argsort(block_s_P, kind="stable"):
        more = min(left, int(most_P[node]) - 1)
        lengths_P[node] += more
        left -= more
    return lengths_P


def even_cuts(most_P: Ints, block_s_P: Floats, num_blocks: int) -> Ints:
    """The numbers of blocks [P] that minimise the time of the slowest node.

    Water filling: each block goes to the node with capacity left that would then finish first.
    Raises as `quickest_cuts` does.
    """
    _check(most_P, num_blocks)
    lengths_P = np.ones(len(most_P), dtype=np.int64)
    queue = [(2 * float(block_s_P[node]), node) for node in range(len(most_P)) if most_P[node] > 1]
    heapq.heapify(queue)
    for _ in range(num_blocks - len(most_P)):
        _, node = heapq.heappop(queue)
        lengths_P[node] += 1
        if lengths_P[node] < most_P[node]:
            heapq.heappush(queue, (float((lengths_P[node] + 1) * block_s_P[node]), node))
    return lengths_P


def _check(most_P: Ints, num_blocks: int) -> None:
    if not 0 < len(most_P) <= num_blocks <= int(most_P.sum()) or most_P.min() < 1:
        raise ValueError(
            f"{num_blocks} blocks do not fit nodes that hold at most {most_P.tolist()}"
        )
