"""Filtrations: weighted graphs in which nodes and edges appear at increasing scales.

Legend: N nodes, R rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nesa_node.core.arrays import Floats, Ints
from nesa_node.topology.links.matrix import Links
from nesa_node.topology.snapshot import Snapshot

# Large matrices are read this many rows at a time: temporaries stay small beside the matrix.
_ROWS_PER_CHUNK = 256
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


def row_blocks(matrix: Floats) -> Iterator[tuple[int, Floats]]:
    """Yield views of up to `_ROWS_PER_CHUNK` rows each, with the index of the first."""
    for start in range(0, len(matrix), _ROWS_PER_CHUNK):
        yield start, matrix[start : start + _ROWS_PER_CHUNK]


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
