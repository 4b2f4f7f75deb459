"""Merge trees: single linkage, and with it H0, for any number of nodes.

Connected components need no complex: a minimum spanning tree (Prim, over rows of the matrix) gives
the scale at which any two nodes become connected. 5,000 nodes take 0.3 s and no second matrix.

The cophenetic height of two nodes is the scale at which they become connected: the largest weight
on the path in a minimum spanning tree. In leaf order that is a running maximum of gaps, so rows are
computed on demand: the matrix of 5,000 nodes takes 200 MB.

Legend: N nodes, E edges of the spanning forest, M merges (N less the components that stay), T
trees, K past trees, C nodes that all trees share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nesa_node.core.arrays import Floats, Ints
from nesa_node.topology.shape.diagrams import PersistenceDiagram, make_diagram
from nesa_node.topology.shape.filtration import Filtration


@dataclass(frozen=True, slots=True, eq=False)
class MergeTree:
    """Merges by increasing height. Ids below N are nodes, N + m is the component of merge m.

    birth_N : [N] float64, of the nodes.
    child_M2 : [M, 2] int64, the two ids that merged; the elder first.
    height_M : [M] float64, the scale of each merge.
    younger_birth_M : [M] float64, when the component that died in it was born (elder rule).
    order_N : [N] int64, nodes as leaves, so that each component is a run of neighbours.
    gap_N : [N] float64, height at which a leaf joins the one before it; inf where it never does.
    """

    birth_N: Floats
    child_M2: Ints
    height_M: Floats
    younger_birth_M: Floats
    order_N: Ints
    gap_N: Floats

    def __len__(self) -> int:
        return len(self.birth_N)

    def largest_branch(self, marked_N: NDArray[np.bool_]) -> int:
        """Number of leaves of the largest fully marked branch; a single leaf is a branch."""
        whole, leaves = marked_N.tolist(), [1] * len(self)
        for first, second in self.child_M2.tolist():
            whole.append(whole[first] and whole[second])
            leaves.append(leaves[first] + leaves[second])
        return max(
            (count for count, all_of_it in zip(leaves, whole, strict=True) if all_of_it), default=0
        )

    def diagram(self) -> PersistenceDiagram:
        """Diagram of H0: each merge kills the younger component; one per part never dies."""
        # The first leaf of a part is its eldest node.
        eldest = self.birth_N[self.order_N[np.isinf(self.gap_N)]]
        births = np.concatenate([self.younger_birth_M, eldest])
        return make_diagram(0, births, np.append(self.height_M, np.full(len(eldest), np.inf)))


def merge_tree(filtration: Filtration) -> MergeTree:
    """Merge tree by Kruskal's order over the spanning forest; ties by the nodes' order."""
    edge_E2, weight_E = spanning_forest(filtration)
    count = len(filtration)
    root = list(range(count))  # of the union-find over nodes
    component = list(range(count))  # root -> id in the tree
    last, follower = list(range(count)), [-1] * count  # leaves of a root's run: the last, the next
    gap_N = np.full(count, np.inf)
    birth = filtration.birth_N.tolist()
    children: list[tuple[int, int]] = []
    younger: list[float] = []
    for merge, (first, second) in enumerate(edge_E2.tolist()):
        a, b = _find_root(root, first), _find_root(root, second)
        if (birth[b], b) < (birth[a], a):
            a, b = b, a
        children.append((component[a], component[b]))
        younger.append(birth[b])
        # A root is the eldest node of its component, and the first leaf of its run.
        root[b], component[a] = a, count + merge
        follower[last[a]] = b
        last[a] = last[b]
        gap_N[b] = weight_E[merge]
    order = []
    for node in range(count):
        leaf = node if root[node] == node else -1
        while leaf >= 0:
            order.append(leaf)
            leaf = follower[leaf]
    order_N = np.array(order, dtype=np.int64)
    return MergeTree(
        filtration.birth_N,
        np.array(children, dtype=np.int64).reshape(-1, 2),
        weight_E,
        np.array(younger, dtype=np.float64),
        order_N,
        gap_N[order_N],
    )


def spanning_forest(filtration: Filtration) -> tuple[Ints, Floats]:
    """Minimum spanning forest (Prim): edges [E, 2] int64, weights [E] float64, sorted by weight."""
    weight_NN = filtration.weight_NN
    count = len(filtration)
    nearest_N = np.full(count, np.inf)
    parent_N = np.zeros(count, dtype=np.int64)
    outside_N = np.ones(count, dtype=bool)
    edges: list[tuple[int, int]] = []
    weights: list[float] = []
    node = 0
    for _ in range(count - 1):
        outside_N[node] = False
        nearest_N[node] = np.inf
        closer_N = weight_NN[node] < nearest_N
        closer_N &= outside_N
        np.copyto(nearest_N, weight_NN[node], where=closer_N)
        parent_N[closer_N] = node
        node = int(nearest_N.argmin())
        if np.isinf(nearest_N[node]):
            node = int(outside_N.argmax())
            continue
        parent = int(parent_N[node])
        edges.append((min(node, parent), max(node, parent)))
        weights.append(float(nearest_N[node]))
    edge_E2 = np.array(edges, dtype=np.int64).reshape(-1, 2)
    weight_E = np.array(weights, dtype=np.float64)
    by_weight = np.lexsort((edge_E2[:, 1], edge_E2[:, 0], weight_E))
    return edge_E2[by_weight], weight_E[by_weight]


def _find_root(root: list[int], node: int) -> int:
    while root[node] != node:
        root[node] = root[root[node]]
        node = root[node]
    return node


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
