"""At which scale two nodes become connected: the cophenetic matrix of single linkage.

It is the largest weight on the path between them in a minimum spanning tree. In leaf order that is
a running maximum of gaps, so rows are made when they are needed: 5,000 nodes would be 200 MB.

Legend: N nodes, T trees, K past trees, C nodes that all trees share.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nesa_node.topology.homology.filtration import Floats, Ints
from nesa_node.topology.homology.merge_tree import MergeTree


def heights_from(tree: MergeTree, leaf: int) -> Floats:
    """[N] float64 *in leaf order*: heights between the leaf at `leaf` and all; 0 to itself."""
    row_N = np.empty(len(tree))
    row_N[leaf] = 0.0
    np.maximum.accumulate(tree.gap_N[leaf + 1 :], out=row_N[leaf + 1 :])
    if leaf:
        np.maximum.accumulate(tree.gap_N[leaf:0:-1], out=row_N[leaf - 1 :: -1])
    return row_N


def cophenetic_matrix(
    tree: MergeTree, dtype: type[np.floating] = np.float32
) -> NDArray[np.floating]:
    """[N, N] in the nodes' order, inf between parts that no edge connects, diagonal 0.

    In float32 by default: at 5,000 nodes that is 100 MB.
    """
    matrix_NN = np.empty((len(tree), len(tree)), dtype=dtype)
    for leaf, node in enumerate(tree.order_N.tolist()):
        matrix_NN[node, tree.order_N] = heights_from(tree, leaf)
    return matrix_NN


def quantile_heights(tree: MergeTree, share: float = 0.5, *, cap: float = np.inf) -> Floats:
    """[N] float64: the least scale at which each node is connected with `share` of the others.

    At a half, that is where the large parts of the network meet, and at a tenth it is the node's
    own neighbourhood. Heights above `cap` count as `cap`. 0.0 for a node alone.
    """
    others = len(tree) - 1
    height_N = np.zeros(len(tree))
    if others > 0:
        # The first place is the node itself.
        place = max(1, int(np.ceil(share * others)))
        for leaf, node in enumerate(tree.order_N.tolist()):
            height_N[node] = np.partition(heights_from(tree, leaf), place)[place]
    return np.minimum(height_N, cap, out=height_N)


def mean_difference(
    past: Sequence[MergeTree],
    node_KC: Ints,
    now: MergeTree,
    node_C: Ints,
    *,
    cap: float = np.inf,
) -> float:
    """The mean absolute difference of cophenetic heights over pairs of common nodes.

    Each pair's height in `now` is compared with the median of those in `past`.

    node_KC : [K, C] int64, the common nodes' indices in each past tree; node_C : [C], in `now`.
    cap : greater heights count as this; needed where a part is unreachable, whose height is inf.

    0.0 with fewer than two common nodes.
    """
    count = len(node_C)
    if count < 2:
        return 0.0
    trees = [*past, now]
    leaf_TC = [
        _positions(tree)[nodes] for tree, nodes in zip(trees, [*node_KC, node_C], strict=True)
    ]
    total = 0.0
    for place in range(count):
        row_TC = np.stack(
            [
                heights_from(tree, int(leaf_C[place]))[leaf_C]
                for tree, leaf_C in zip(trees, leaf_TC, strict=True)
            ]
        )
        np.minimum(row_TC, cap, out=row_TC)
        before_C = row_TC[0] if len(past) == 1 else np.median(row_TC[:-1], axis=0)
        total += float(np.abs(row_TC[-1] - before_C).sum())
    return total / (count * (count - 1))


def _positions(tree: MergeTree) -> Ints:
    """[N] int64: where each node stands in leaf order."""
    position_N = np.empty(len(tree), dtype=np.int64)
    position_N[tree.order_N] = np.arange(len(tree))
    return position_N
