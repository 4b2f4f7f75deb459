"""Shape of a network: merge tree, H0, H1, the median edge as its unit, and its feature vector.

H1 is the rings that no shorter links fill, with a cycle of nodes for each. The features are input
of the regression that chooses placement schemas.

Legend: N nodes, K landmarks, P classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nesa_node.core.arrays import Ints
from nesa_node.topology.shape.gudhi_backend import TooManyTrianglesError, flag_pairs, rips_h1
from nesa_node.topology.shape.merge_tree import (
    Filtration,
    MergeTree,
    PersistenceDiagram,
    betti_numbers,
    make_diagram,
    merge_tree,
)

Edge = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Loop:
    """One class of H1 with a representative cycle."""

    birth: float
    death: float
    edges: tuple[Edge, ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(sorted({node for edge in self.edges for node in edge}))


def loop_diagram(filtration: Filtration, *, threshold: float = np.inf) -> PersistenceDiagram:
    """Diagram of H1 up to `threshold`; classes that are alive there have death inf.

    Births of nodes are irrelevant: no edge is born before its ends, so an unborn node has no edges
    and is in no loop.
    """
    threshold = min(threshold, filtration.largest_weight())
    if len(filtration) < 4:
        return make_diagram(1, np.empty(0), np.empty(0))
    point_P2 = rips_h1(filtration.weight_NN, threshold)
    return make_diagram(1, point_P2[:, 0], point_P2[:, 1])


def longest_loops(
    filtration: Filtration,
    max_loops: int = 5,
    *,
    threshold: float = np.inf,
    diagram: PersistenceDiagram | None = None,
) -> tuple[Loop, ...]:
    """The `max_loops` longest-lived classes with a cycle each; for a few hundred nodes.

    `diagram` is the result of `loop_diagram`, if known. A cycle is the reduced boundary of the
    triangle that kills the class, which is certain to die with it; a cycle closed by a shortest
    path may also run round an older hole. A class that never dies gets any cycle through its
    youngest edge.

    Raises `TooManyTrianglesError` if the filtration up to the last birth or death is too large.
    """
    if max_loops < 1:
        return ()
    if diagram is None:
        diagram = loop_diagram(filtration, threshold=threshold)
    if not len(diagram):
        return ()
    # Most triangles lie beyond the last birth or death, and change no ring.
    changes = np.concatenate((diagram.birth_P, diagram.death_P))
    last = float(changes[np.isfinite(changes)].max())
    value, killers_of = flag_pairs(filtration.weight_NN, last)
    edges = [(simplex[0], simplex[1]) for simplex in value if len(simplex) == 2]
    killer = {(edge[0], edge[1]): dead for edge, dead in killers_of.items()}
    death = {edge: value[dead] if dead else np.inf for edge, dead in killer.items()}
    by_life = sorted(death, key=lambda edge: (value[edge] - death[edge], edge))
    longest = [edge for edge in by_life[:max_loops] if value[edge] < death[edge]]
    triangles = [simplex for simplex in value if len(simplex) == 3]
    cycles = dict(_reduce_boundaries(triangles, edges, {edge for edge in longest if killer[edge]}))
    return tuple(
        Loop(
            value[edge],
            death[edge],
            tuple(sorted(cycles.get(edge) or _shortest_cycle(edge, edges))),
        )
        for edge in longest
    )


def _reduce_boundaries(
    triangles: Sequence[tuple[int, ...]], edges: list[Edge], wanted: set[Edge]
) -> Iterator[tuple[Edge, list[Edge]]]:
    """Reduce the boundary matrix; yields the wanted columns by their youngest edge.

    `triangles` are those that kill a class, in order: as in "involuted" homology (Cufar and Virk,
    2021) all other columns reduce to zero and are skipped.
    """
    place = {edge: position for position, edge in enumerate(edges)}
    columns: dict[int, set[int]] = {}
    missing = len(wanted)
    for a, b, c in triangles:
        if not missing:
            return
        column = {place[a, b], place[a, c], place[b, c]}
        while (youngest := max(column)) in columns:
            column ^= columns[youngest]
        columns[youngest] = column
        if edges[youngest] in wanted:
            missing -= 1
            yield edges[youngest], [edges[position] for position in column]


def _shortest_cycle(edge: Edge, edges: list[Edge]) -> list[Edge]:
    """`edge` and the fewest earlier edges that connect its ends (breadth-first search)."""
    neighbours: dict[int, list[int]] = {}
    for a, b in edges[: edges.index(edge)]:
        neighbours.setdefault(a, []).append(b)
        neighbours.setdefault(b, []).append(a)
    start, end = edge
    came_from = {start: start}
    ring = [start]
    while end not in came_from:
        ring = [near for node in ring for near in _visit_neighbours(node, neighbours, came_from)]
        assert ring, "an edge that makes a class of H1 connects what was connected"
    path = [edge]
    while end != start:
        path.append((min(end, came_from[end]), max(end, came_from[end])))
        end = came_from[end]
    return path


def _visit_neighbours(
    node: int, neighbours: dict[int, list[int]], came_from: dict[int, int]
) -> list[int]:
    new = [near for near in neighbours.get(node, ()) if near not in came_from]
    came_from.update(dict.fromkeys(new, node))
    return new


@dataclass(frozen=True, slots=True, eq=False)
class Landmarks:
    """Landmark nodes, [K] int64, sorted. Every node is within `cover_radius` of a landmark.

    In a metric space the bottleneck distance of both diagrams is at most 2 `cover_radius`. Round
    trips violate the triangle inequality, so for them that is no bound.
    """

    node_K: Ints
    cover_radius: float


def choose_landmarks(filtration: Filtration, count: int) -> Landmarks:
    """Choose landmarks greedily: start at the graph's centre, then add the farthest node.

    Every connected component gets one first, if `count` suffices. Returns all nodes, with radius 0,
    if there are at most `count`.
    """
    if count < 1:
        raise ValueError(f"at least one landmark, not {count}")
    if count >= len(filtration):
        return Landmarks(np.arange(len(filtration)), 0.0)
    weight_NN = filtration.weight_NN
    chosen = [int(weight_NN.max(axis=1).argmin())]
    far_N = weight_NN[chosen[0]].copy()
    while len(chosen) < count:
        chosen.append(int(far_N.argmax()))
        np.minimum(far_N, weight_NN[chosen[-1]], out=far_N)
    return Landmarks(np.sort(np.array(chosen, dtype=np.int64)), float(far_N.max()))


# gudhi needs 5 ms for 200 nodes, 0.3 s for 1,000 and 11 s for 5,000.
MAX_EXACT_H1_NODES = 500
NUM_LANDMARKS = 200


@dataclass(frozen=True, slots=True, eq=False)
class NetworkShape:
    """Shape of a network. `median_edge` is its unit; `h1` and `loops` are those of `landmarks`.

    Nodes in `loops` are indices into the whole filtration. `loop_nodes` is the number of nodes that
    cycles were computed on: fewer than `h1` uses if there are many nodes or triangles.
    """

    tree: MergeTree
    h0: PersistenceDiagram
    h1: PersistenceDiagram
    loops: tuple[Loop, ...]
    loop_nodes: int
    landmarks: Landmarks
    median_edge: float

    def betti(self, scale: float) -> tuple[int, int]:
        b0, b1 = betti_numbers((self.h0, self.h1), scale)
        return b0, b1


def compute_shape(
    filtration: Filtration,
    *,
    threshold: float = np.inf,
    max_exact_nodes: int = MAX_EXACT_H1_NODES,
    num_landmarks: int = NUM_LANDMARKS,
    max_loops: int = 5,
) -> NetworkShape:
    """Compute the shape: H0 of all nodes; H1 up to `threshold`, of all nodes or of landmarks.

    Beyond `max_exact_nodes` nodes H1 is that of `landmarks` nodes.

    Raises `ValueError` for an empty network.
    """
    if not len(filtration):
        raise ValueError("a network without nodes has no shape")
    exact = len(filtration) <= max_exact_nodes
    chosen = choose_landmarks(filtration, len(filtration) if exact else num_landmarks)
    # Cycles cost more than diagrams: they are computed on landmarks even if H1 is exact.
    part = filtration if exact else filtration.restrict(chosen.node_K)
    h1 = loop_diagram(part, threshold=threshold)
    few = (
        chosen
        if len(chosen.node_K) <= num_landmarks
        else choose_landmarks(filtration, num_landmarks)
    )
    known = h1 if few is chosen else None
    while True:
        sparse = filtration.restrict(few.node_K)
        try:
            found = longest_loops(sparse, max_loops, threshold=threshold, diagram=known)
            break
        except TooManyTrianglesError:
            few, known = choose_landmarks(filtration, len(few.node_K) // 2), None
    node = few.node_K.tolist()
    loops = tuple(
        Loop(loop.birth, loop.death, tuple((node[a], node[b]) for a, b in loop.edges))
        for loop in found
    )
    tree, unit = merge_tree(filtration), filtration.median_weight()
    return NetworkShape(tree, tree.diagram(), h1, loops, len(node), chosen, unit)


# All lengths are relative to the median edge, so that swarms of any extent compare.
BETTI_SCALES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5)
_STATISTICS = ("count", "sum", "mean", "std", "median", "p90", "max", "entropy")


def compute_features(shape: NetworkShape) -> dict[str, float]:
    """Features of a shape: lifetime statistics and Betti curves of H0 and H1.

    "unit" is the median edge in the filtration's own unit; all other lengths are relative to it.
    "h0.betti@s" is the number of components at `s` times the unit, per node. Counts of H1 are per
    node that it was computed on. Essential classes count in "parts" and Betti curves only.
    """
    unit = shape.median_edge or 1.0
    h0, h1 = _scale_diagram(shape.h0, unit), _scale_diagram(shape.h1, unit)
    nodes, sampled = len(shape.tree), len(shape.landmarks.node_K)
    features = {
        "nodes": float(nodes),
        "unit": float(shape.median_edge),
        "parts": float(h0.num_essential),
    }
    for name, diagram, size in (("h0", h0, nodes), ("h1", h1, sampled)):
        values = zip(_STATISTICS, _lifetime_statistics(diagram, size), strict=True)
        features |= {f"{name}.{statistic}": value for statistic, value in values}
    for name, diagram, size in (("h0", h0, nodes), ("h1", h1, sampled)):
        features |= {f"{name}.betti@{scale}": diagram.betti(scale) / size for scale in BETTI_SCALES}
    return features


def _scale_diagram(diagram: PersistenceDiagram, unit: float) -> PersistenceDiagram:
    return make_diagram(diagram.dimension, diagram.birth_P / unit, diagram.death_P / unit)


def _lifetime_statistics(diagram: PersistenceDiagram, nodes: int) -> list[float]:
    """Lifetime statistics in the order of `_STATISTICS`; zeros if no class dies."""
    life_P = diagram.lifetime_P[np.isfinite(diagram.death_P)]
    if not len(life_P):
        return [0.0] * len(_STATISTICS)
    total = float(life_P.sum())
    share_P = life_P / total
    return [
        len(life_P) / nodes,
        total / nodes,
        float(life_P.mean()),
        float(life_P.std()),
        float(np.median(life_P)),
        float(np.quantile(life_P, 0.9)),
        float(life_P.max()),
        # Persistent entropy: 0 for a single class, 1 if all lifetimes are equal.
        float(-(share_P * np.log(share_P)).sum() / np.log(max(len(life_P), 2))),
    ]
