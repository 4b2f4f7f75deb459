"""At which scale two nodes become connected: the cophenetic matrix of single linkage.

It is the largest weight on the path between them in a minimum spanning tree. In leaf order that is
a running maximum of gaps, so rows are made when they are needed: 5,000 nodes would be 200 MB.

Legend: N nodes, C nodes that two trees share.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nesa_node.topology.homology.filtration import Floats, Ints
from nesa_node.topology.homology.merge_tree import MergeTree


def heights_from(tree: MergeTree, leaf: int) -> Floats:
    """[N] float64 *in leaf order*: heights between the leaf at position `leaf` and all; 0 to itself."""
    row_N = np.empty(len(tree))
    row_N[leaf] = 0.0
    np.maximum.accumulate(tree.gap_N[leaf + 1 :], out=row_N[leaf + 1 :])
    if leaf:
        np.maximum.accumulate(tree.gap_N[leaf:0:-1], out=row_N[leaf - 1 :: -1])
    return row_N


def cophenetic_matrix(tree: MergeTree, dtype: type[np.floating] = np.float32) -> NDArray[np.floating]:
    """[N, N] in the nodes' order, inf between parts that no edge connects, diagonal 0.

    In float32 by default: at 5,000 nodes that is 100 MB.
    """
    matrix_NN = np.empty((len(tree), len(tree)), dtype=dtype)
    for leaf, node in enumerate(tree.order_N.tolist()):
        matrix_NN[node, tree.order_N] = heights_from(tree, leaf)
    return matrix_NN


def median_heights(tree: MergeTree, *, cap: float = np.inf) -> Floats:
    """[N] float64: each node's median height to the others, which says how central it is.

    Heights above `cap` count as `cap`. 0.0 for a node that is alone in the tree.
    """
    median_N = np.zeros(len(tree))
    if len(tree) > 1:
        for leaf, node in enumerate(tree.order_N.tolist()):
            row_N = np.delete(heights_from(tree, leaf), leaf)
            median_N[node] = np.median(np.minimum(row_N, cap))
    return median_N


def mean_difference(
    first: MergeTree,
    second: MergeTree,
    common: Sequence[tuple[int, int]] | Ints,
    *,
    cap: float = np.inf,
) -> float:
    """The mean absolute difference of two cophenetic matrices over pairs of common nodes.

    common : [C, 2], a node's index in the first and in the second tree.
    cap : greater heights count as this; needed where a part is unreachable, whose height is inf.

    0.0 with fewer than two common nodes.
    """
    common_C2 = np.asarray(common, dtype=np.int64).reshape(-1, 2)
    count = len(common_C2)
    if count < 2:
        return 0.0
    leaves_C2 = np.stack([_positions(first)[common_C2[:, 0]], _positions(second)[common_C2[:, 1]]], 1)
    total = 0.0
    for leaf_a, leaf_b in leaves_C2.tolist():
        a_C = np.minimum(heights_from(first, leaf_a)[leaves_C2[:, 0]], cap)
        b_C = np.minimum(heights_from(second, leaf_b)[leaves_C2[:, 1]], cap)
        a_C -= b_C
        total += float(np.abs(a_C, out=a_C).sum())
    return total / (count * (count - 1))


def _positions(tree: MergeTree) -> Ints:
    """[N] int64: where each node stands in leaf order."""
    position_N = np.empty(len(tree), dtype=np.int64)
    position_N[tree.order_N] = np.arange(len(tree))
    return position_N
