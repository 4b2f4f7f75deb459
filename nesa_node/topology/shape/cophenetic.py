"""Cophenetic heights of single linkage: the scale at which two nodes become connected.

A height is the largest weight on the path in a minimum spanning tree. In leaf order that is a
running maximum of gaps, so rows are computed on demand: the matrix of 5,000 nodes takes 200 MB.

Legend: N nodes, T trees, K past trees, C nodes that all trees share.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nesa_node.core.arrays import Floats, Ints
from nesa_node.topology.shape.merge_tree import MergeTree


def leaf_heights(tree: MergeTree, leaf: int) -> Floats:
    """Heights between the leaf at `leaf` and all, [N] float64 *in leaf order*; 0 to itself."""
    row_N = np.empty(len(tree))
    row_N[leaf] = 0.0
    np.maximum.accumulate(tree.gap_N[leaf + 1 :], out=row_N[leaf + 1 :])
    if leaf:
        np.maximum.accumulate(tree.gap_N[leaf:0:-1], out=row_N[leaf - 1 :: -1])
    return row_N


def quantile_heights(tree: MergeTree, share: float = 0.5, *, cap: float = np.inf) -> Floats:
    """Least scale at which each node is connected with `share` of the other nodes, [N] float64.

    A half gives the scale at which large parts of the network merge, a tenth that of the node's own
    neighbourhood. Heights above `cap` count as `cap`. 0.0 for a single node.
    """
    others = len(tree) - 1
    height_N = np.zeros(len(tree))
    if others > 0:
        # The first place is the node itself.
        place = max(1, int(np.ceil(share * others)))
        for leaf, node in enumerate(tree.order_N.tolist()):
            height_N[node] = np.partition(leaf_heights(tree, leaf), place)[place]
    return np.minimum(height_N, cap, out=height_N)


def mean_difference(
    past: Sequence[MergeTree],
    node_KC: Ints,
    now: MergeTree,
    node_C: Ints,
    *,
    cap: float = np.inf,
) -> float:
    """Mean absolute difference of cophenetic heights over pairs of common nodes.

    Each pair's height in `now` is compared with the median of those in `past`.

    node_KC : [K, C] int64, the common nodes' indices in each past tree; node_C : [C], in `now`.
    cap : greater heights count as this; needed for unconnected parts, which have height inf.

    0.0 with fewer than two common nodes.
    """
    count = len(node_C)
    if count < 2:
        return 0.0
    trees = [*past, now]
    leaf_TC = [
        _leaf_positions(tree)[nodes] for tree, nodes in zip(trees, [*node_KC, node_C], strict=True)
    ]
    total = 0.0
    for place in range(count):
        row_TC = np.stack(
            [
                leaf_heights(tree, int(leaf_C[place]))[leaf_C]
                for tree, leaf_C in zip(trees, leaf_TC, strict=True)
            ]
        )
        np.minimum(row_TC, cap, out=row_TC)
        before_C = row_TC[0] if len(past) == 1 else np.median(row_TC[:-1], axis=0)
        total += float(np.abs(row_TC[-1] - before_C).sum())
    return total / (count * (count - 1))


def _leaf_positions(tree: MergeTree) -> Ints:
    """Position of each node in leaf order, [N] int64."""
    position_N = np.empty(len(tree), dtype=np.int64)
    position_N[tree.order_N] = np.arange(len(tree))
    return position_N
