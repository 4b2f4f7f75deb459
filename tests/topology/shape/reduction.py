"""Persistent homology by the textbook: all simplices of a flag complex, one matrix over Z/2.

Slow and obvious, and it shares nothing with the package: the tests compare it with that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Simplex = tuple[int, ...]
Bar = tuple[float, float]


def flag_filtration(
    weight_NN: NDArray[np.float64], birth_N: Sequence[float] | NDArray[np.float64] | None = None
) -> dict[Simplex, float]:
    """Nodes, edges and triangles with their scales; an edge waits for its ends."""
    count = len(weight_NN)
    births = [0.0] * count if birth_N is None else [float(birth) for birth in birth_N]
    scale: dict[Simplex, float] = {(node,): births[node] for node in range(count)}
    for a, b in itertools.combinations(range(count), 2):
        scale[a, b] = max(float(weight_NN[a, b]), births[a], births[b])
    for a, b, c in itertools.combinations(range(count), 3):
        scale[a, b, c] = max(scale[a, b], scale[a, c], scale[b, c])
    return {simplex: value for simplex, value in scale.items() if math.isfinite(value)}


def bars(scale: dict[Simplex, float]) -> dict[int, list[Bar]]:
    """Sorted (birth, death) of H0 and H1, without those that live for no time."""
    order = sorted(scale, key=lambda simplex: (scale[simplex], len(simplex), simplex))
    place = {simplex: position for position, simplex in enumerate(order)}
    columns: list[set[int]] = []
    killer_of: dict[int, int] = {}
    for position, simplex in enumerate(order):
        faces = itertools.combinations(simplex, len(simplex) - 1) if len(simplex) > 1 else ()
        column = {place[face] for face in faces}
        while column and max(column) in killer_of:
            column ^= columns[killer_of[max(column)]]
        columns.append(column)
        if column:
            killer_of[max(column)] = position
    found: dict[int, list[Bar]] = {0: [], 1: []}
    for position, simplex in enumerate(order):
        if columns[position] or len(simplex) > 2:
            continue
        birth = scale[simplex]
        death = scale[order[killer_of[position]]] if position in killer_of else math.inf
        if death > birth:
            found[len(simplex) - 1].append((birth, death))
    return {dimension: sorted(of) for dimension, of in found.items()}


def betti_by_rank(scale: dict[Simplex, float], at: float) -> tuple[int, int]:
    """b0 and b1 of the complex at one scale, from ranks alone: no persistence, no order."""
    alive = [simplex for simplex, value in scale.items() if value <= at]
    nodes, edges, triangles = ([s for s in alive if len(s) == size] for size in (1, 2, 3))
    edge_rank = rank(boundary(edges, nodes))
    return len(nodes) - edge_rank, len(edges) - edge_rank - rank(boundary(triangles, edges))


def boundary(simplices: Sequence[Simplex], faces: Sequence[Simplex]) -> list[set[int]]:
    place = {face: position for position, face in enumerate(faces)}
    return [{place[f] for f in itertools.combinations(s, len(s) - 1)} for s in simplices]


def rank(columns: Iterable[set[int]]) -> int:
    """Over Z/2."""
    kept: dict[int, set[int]] = {}
    for column in columns:
        left = set(column)
        while left and max(left) in kept:
            left ^= kept[max(left)]
        if left:
            kept[max(left)] = left
    return len(kept)
