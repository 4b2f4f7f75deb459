"""Filtrations, merge trees (single linkage, and with it H0) and persistence diagrams of networks.

A filtration is a weighted graph in which nodes and edges appear at increasing scales. Connected
components need no complex: a minimum spanning tree (Prim, over rows of the matrix) gives the scale
at which any two nodes become connected. 5,000 nodes take 0.3 s and no second matrix.

The cophenetic height of two nodes is the scale at which they become connected: the largest weight
on the path in a minimum spanning tree. In leaf order that is a running maximum of gaps, so rows are
computed on demand: the matrix of 5,000 nodes takes 200 MB.

Legend: N nodes, E edges of the spanning forest, M merges (N less the components that stay), T
trees, K past trees, C nodes that all trees share, R rows at a time, P classes of a diagram.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nesa_node.core.arrays import Floats, Ints, row_blocks
from nesa_node.topology.links.matrix import Links
from nesa_node.topology.snapshot import Snapshot


@dataclass(frozen=True, slots=True, eq=False)
class PersistenceDiagram:
    """Classes of H`dimension`, longest-lived first. A class that never dies has death inf.

    Classes that die as they are born are left out.

    birth_P, death_P : [P] float64.
    """

    dimension: int
    birth_P: Floats
    death_P: Floats

    def __len__(self) -> int:
        return len(self.birth_P)

    @property
    def lifetime_P(self) -> Floats:
        return self.death_P - self.birth_P

    @property
    def num_essential(self) -> int:
        """Number of classes that never die."""
        return int(np.isinf(self.death_P).sum())

    def betti(self, scale: float) -> int:
        """Betti number at `scale`: the number of live classes, simplices of `scale` included."""
        return int(((self.birth_P <= scale) & (scale < self.death_P)).sum())

    def barcode(self, max_bars: int | None = None) -> tuple[tuple[float, float], ...]:
        """(birth, death) of the `most` longest bars."""
        bars = zip(self.birth_P.tolist(), self.death_P.tolist(), strict=True)
        return tuple(bars)[:max_bars]


def make_diagram(dimension: int, birth_P: Floats, death_P: Floats) -> PersistenceDiagram:
    """Make a diagram: sort by lifetime, then birth; drop classes of zero lifetime."""
    birth_P = np.asarray(birth_P, dtype=np.float64)
    death_P = np.asarray(death_P, dtype=np.float64)
    lives = death_P > birth_P
    birth_P, death_P = birth_P[lives], death_P[lives]
    order = np.lexsort((birth_P, birth_P - death_P))
    return PersistenceDiagram(dimension, birth_P[order], death_P[order])


def betti_numbers(diagrams: Iterable[PersistenceDiagram], scale: float) -> tuple[int, ...]:
    """Betti numbers at `scale`, one per diagram."""
    return tuple(diagram.betti(scale) for diagram in diagrams)


_MAX_SAMPLED_ROWS = 500


@dataclass(frozen=True, slots=True, eq=False)
class Filtration:
    """Weighted graph; at scale t it has the nodes born by t and the edges of weight at most t.

    Made by `make_filtration` only, which ensures that no edge is born before its ends.

    weight_NN : [N, N] float64, symmetric, diagonal 0, inf where there is no edge; read-only.
    birth_N : [N] float64, finite; read-only.
    """

    weight_NN: Floats
    birth_N: Floats

    def __len__(self) -> int:
        return len(self.birth_N)

    def restrict(self, nodes: Sequence[int] | Ints) -> Filtration:
        """The filtration induced by `nodes`, in their order."""
        chosen = np.asarray(nodes, dtype=np.int64)
        return Filtration(
            _read_only(self.weight_NN[np.ix_(chosen, chosen)]), _read_only(self.birth_N[chosen])
        )

    def largest_weight(self) -> float:
        """Largest finite weight; 0.0 without edges."""
        return max(
            (
                float(np.max(rows, initial=0.0, where=np.isfinite(rows)))
                for _, rows in row_blocks(self.weight_NN)
            ),
            default=0.0,
        )

    def median_weight(self) -> float:
        """Median finite weight, the unit of other figures; 0.0 without edges.

        Beyond 500 nodes it is the median of 500 evenly spaced rows.
        """
        step = -(-len(self) // _MAX_SAMPLED_ROWS) or 1
        rows = np.arange(0, len(self), step)
        sample = self.weight_NN[rows]
        sample[np.arange(len(rows)), rows] = np.inf
        finite = sample[np.isfinite(sample)]
        return float(np.median(finite)) if len(finite) else 0.0


def make_filtration(weight_NN: Floats, birth_N: Floats | None = None) -> Filtration:
    """Make a filtration; an edge born before one of its ends is raised to that end's birth.

    Weights are copied only if an edge is raised; neither argument is modified. Without `birth_N`
    nodes are born at 0. Raises `ValueError` for a matrix that is not square and symmetric with a
    zero diagonal, for NaN, a negative weight, or a birth that is not finite.
    """
    weight_NN = np.asarray(weight_NN, dtype=np.float64)
    if weight_NN.ndim != 2 or weight_NN.shape[0] != weight_NN.shape[1]:
        raise ValueError(f"weights must be a square matrix, not {weight_NN.shape}")
    count = len(weight_NN)
    birth_N = np.zeros(count) if birth_N is None else np.array(birth_N, dtype=np.float64)
    if birth_N.shape != (count,) or not np.isfinite(birth_N).all():
        raise ValueError(f"births must be {count} finite numbers, one per node")
    if np.any(np.diagonal(weight_NN) != 0):
        raise ValueError("the weight of a node to itself must be 0: births go into `birth_N`")
    raises = False
    for start, rows in row_blocks(weight_NN):
        if not (rows >= 0).all():
            raise ValueError("a weight is negative or NaN; give inf where there is no edge")
        if not np.array_equal(rows, weight_NN[:, start : start + len(rows)].T):
            raise ValueError("weights differ by direction: make them symmetric first")
        raises = raises or bool((rows < _later_births(birth_N, start, rows)).any())
    if raises:
        weight_NN = weight_NN.copy()
        for start, rows in row_blocks(weight_NN):
            np.maximum(rows, _later_births(birth_N, start, rows), out=rows)
        np.fill_diagonal(weight_NN, 0.0)
    return Filtration(_read_only(weight_NN), _read_only(birth_N))


def _later_births(birth_N: Floats, start: int, rows: Floats) -> Floats:
    """Birth of the later end of each edge, [R, N]; 0 on the diagonal."""
    first_R = birth_N[start : start + len(rows)]
    later: Floats = np.maximum(first_R[:, None], birth_N)
    later[np.arange(len(rows)), np.arange(start, start + len(rows))] = 0.0
    return later


def _read_only(array: Floats) -> Floats:
    view = array.view()
    view.flags.writeable = False
    return view


EARTH_RADIUS_KM = 6371.0088


def round_trip_filtration(snapshot: Snapshot) -> Filtration:
    """Filtration of the serving nodes by round trip in ms; unknown pairs have no edge."""
    peers = tuple(node.peer_id for node in snapshot.nodes)
    links = (snapshot.links or Links.unknown(peers)).select(peers)
    return make_filtration(np.where(np.isnan(links.rtt_ms_NN), np.inf, links.rtt_ms_NN))


def network_filtration(round_trip_s_NN: Floats, *, compute_s_N: Floats | None = None) -> Filtration:
    """Filtration by seconds: a node is born at its compute time, an edge at a step's time over it.

    weight = round trip / 2 + compute of both ends, so that no edge is born before its ends. Section
    3.1 of the paper fixes only "strongest connections first"; it prints no formula.

    round_trip_s_NN : [N, N] float64, symmetric; inf where there is no edge. Not modified.
    compute_s_N : [N] float64, seconds that one step takes a node; 0 if not given.

    Raises `ValueError` as `make_filtration` does, and for times that are negative.
    """
    weight_NN = np.array(round_trip_s_NN, dtype=np.float64)
    compute_N = None if compute_s_N is None else np.asarray(compute_s_N, dtype=np.float64)
    if compute_N is not None and np.any(compute_N < 0):
        raise ValueError("a compute time is negative")
    for start, rows in row_blocks(weight_NN):
        rows /= 2
        if compute_N is not None:
            # Both ends are added first: that is symmetric to the last bit.
            rows += compute_N[start : start + len(rows), None] + compute_N
    np.fill_diagonal(weight_NN, 0.0)
    return make_filtration(weight_NN, compute_N)


def geographic_filtration(latitude_N: Floats, longitude_N: Floats) -> Filtration:
    """Filtration by great-circle km (haversine), from degrees. All nodes are born at 0.

    Raises `ValueError` for places that are not on the globe; leave out nodes without a location.
    """
    latitude_N = np.asarray(latitude_N, dtype=np.float64)
    longitude_N = np.asarray(longitude_N, dtype=np.float64)
    on_globe = (np.abs(latitude_N) <= 90) & (np.abs(longitude_N) <= 180)
    if latitude_N.shape != longitude_N.shape or latitude_N.ndim != 1 or not on_globe.all():
        raise ValueError(
            "places are degrees: latitudes to 90, longitudes to 180, one each per node"
        )
    lat_N, lon_N = np.radians(latitude_N), np.radians(longitude_N)
    haversine_NN = np.sin((lat_N[:, None] - lat_N) / 2) ** 2
    across_NN = np.sin((lon_N[:, None] - lon_N) / 2) ** 2
    # cos(a) * cos(b) is the same for both directions; (cos(a) * x) * cos(b) need not be.
    across_NN *= np.outer(np.cos(lat_N), np.cos(lat_N))
    haversine_NN += across_NN
    np.sqrt(np.clip(haversine_NN, 0.0, 1.0, out=haversine_NN), out=haversine_NN)
    np.arcsin(haversine_NN, out=haversine_NN)
    haversine_NN *= 2 * EARTH_RADIUS_KM
    return make_filtration(haversine_NN)


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


def components_at(tree: MergeTree, height: float) -> Ints:
    """The number of each node's component at scale `height`, [N] from 0, in leaf order."""
    component_N = np.empty(len(tree), dtype=np.int64)
    component_N[tree.order_N] = np.cumsum(tree.gap_N > height) - 1
    return component_N


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
