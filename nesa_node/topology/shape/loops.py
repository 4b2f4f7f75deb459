"""H1 of a network: its rings that no shorter links fill, with a cycle of nodes for each.

Legend: N nodes, P classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nesa_node.topology.shape.diagrams import PersistenceDiagram, make_diagram
from nesa_node.topology.shape.filtration import Filtration
from nesa_node.topology.shape.gudhi_backend import flag_pairs, rips_h1

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
