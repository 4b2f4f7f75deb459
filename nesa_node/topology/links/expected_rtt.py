"""Expected round trips, from locations or from network coordinates.

Between nodes with known locations, the prior is a least-squares fit of round trips: height_i +
height_j + stretch x light time on a great circle. A kernel smoother over pairs corrects it by
measurements of nearby pairs. Cable detours belong to regions, not to machines: if a node in Mumbai
reaches Frankfurt across the Pacific, so do its neighbours, and to Paris, too. So log(measured /
expected) is averaged over measured pairs, weighted by the distance of both ends to those of the
pair in question, and shrunk towards no correction where few pairs are measured.

There are at most `MAX_CLUSTERS` clusters of nodes, so that 5,000 nodes cost as little as 200.

Network coordinates are Vivaldi's: Dabek et al., "Vivaldi: a decentralized network coordinate
system", SIGCOMM 2004, with heights: the round trip between two nodes is the distance of their
positions plus both heights, which stand for access links. Each measurement moves coordinates a
little. The planner fits all of them at once; daemons announce none.

Claimed measurements may be false, so one moves a node by at most `MAX_STEP_MS` (attacks: Kaafar et
al., "Real attacks on virtual networks", 2006).

Legend: N nodes in P clusters, M nodes with a neighbour, K dimensions, E measured pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array, vstack
from scipy.sparse.linalg import lsqr

from nesa_node.core.arrays import Floats, Ints
from nesa_node.topology.geography import (
    EARTH_RADIUS_KM,
    FIBRE_KM_PER_RTT_MS,
    great_circle_km,
    min_rtt_ms,
    unit_vectors,
)

NUM_DIMENSIONS = 3
MAX_POSITION_MS = 1000.0
MIN_HEIGHT_MS = 0.1
MAX_HEIGHT_MS = 1000.0
MIN_ERROR = 0.05
MAX_ERROR = 1.0
MAX_STEP_MS = 40.0
GAIN = 0.25
"""Step size: c_c and c_e of the paper."""
CABLE_STRETCH = 1.6
"""Initial ratio of round trips to those of light along a great circle."""


def positions_from_places(locations_N2: Floats) -> Floats:
    """Positions in milliseconds of round trip, [N, 3]; zero for unknown locations."""
    positions_N3 = unit_vectors(locations_N2) * (
        EARTH_RADIUS_KM / FIBRE_KM_PER_RTT_MS * CABLE_STRETCH
    )
    return np.nan_to_num(positions_N3)


@dataclass(frozen=True, slots=True, eq=False)
class NetworkCoordinates:
    """Coordinates of N nodes. `error_N` is the recent relative error of each one's predictions."""

    position_ms_NK: Floats
    height_ms_N: Floats
    error_N: Floats

    def select(self, rows: Ints) -> NetworkCoordinates:
        return NetworkCoordinates(
            self.position_ms_NK[rows], self.height_ms_N[rows], self.error_N[rows]
        )

    def predict_ms_NN(self) -> Floats:
        """Predicted round trips [N, N] in ms, zero on the diagonal."""
        square_N = np.einsum("nk,nk->n", self.position_ms_NK, self.position_ms_NK)
        rtt_ms_NN = self.position_ms_NK @ self.position_ms_NK.T
        rtt_ms_NN *= -2.0
        rtt_ms_NN += square_N[:, None]
        rtt_ms_NN += square_N[None, :]
        np.sqrt(np.maximum(rtt_ms_NN, 0.0, out=rtt_ms_NN), out=rtt_ms_NN)
        rtt_ms_NN += self.height_ms_N[:, None]
        rtt_ms_NN += self.height_ms_N[None, :]
        np.fill_diagonal(rtt_ms_NN, 0.0)
        return rtt_ms_NN


def update_coordinates(
    own: NetworkCoordinates,
    other: NetworkCoordinates,
    rtt_ms_N: Floats,
    rng: np.random.Generator,
    gain: float = GAIN,
) -> NetworkCoordinates:
    """`own` after one measured round trip per node to its `other` (figure 3 of the paper)."""
    apart_NK = own.position_ms_NK - other.position_ms_NK
    distance_N = np.linalg.norm(apart_NK, axis=1)
    heights_N = own.height_ms_N + other.height_ms_N
    expected_N = distance_N + heights_N
    weight_N = own.error_N / (own.error_N + np.maximum(other.error_N, MIN_ERROR))
    wrong_N = np.minimum(np.abs(expected_N - rtt_ms_N) / rtt_ms_N, MAX_ERROR)
    error_N = own.error_N + gain * weight_N * (wrong_N - own.error_N)
    step_N = np.clip(gain * weight_N * (rtt_ms_N - expected_N), -MAX_STEP_MS, MAX_STEP_MS)

    together_N = distance_N < 1e-6
    anywhere_NK = rng.normal(size=apart_NK.shape)
    anywhere_NK /= np.linalg.norm(anywhere_NK, axis=1, keepdims=True)
    away_NK = apart_NK / np.maximum(distance_N, 1e-6)[:, None]
    away_NK[together_N] = anywhere_NK[together_N]
    # Horizontal part of the unit vector of a height vector.
    outward_N = np.where(together_N, 1.0, distance_N / expected_N)
    position_NK = own.position_ms_NK + (step_N * outward_N)[:, None] * away_NK
    height_N = own.height_ms_N + step_N * heights_N / expected_N
    return NetworkCoordinates(
        np.clip(position_NK, -MAX_POSITION_MS, MAX_POSITION_MS),
        np.clip(height_N, MIN_HEIGHT_MS, MAX_HEIGHT_MS),
        np.clip(error_N, MIN_ERROR, MAX_ERROR),
    )


def fit_coordinates(
    rtt_ms_NN: Floats, start: NetworkCoordinates, rng: np.random.Generator, *, rounds: int = 800
) -> NetworkCoordinates:
    """`start` after `rounds` in each of which every node uses one random measured neighbour.

    `rtt_ms_NN` is NaN for unmeasured pairs. Nodes without a neighbour keep their coordinates. Steps
    shrink to zero towards the end, unlike in the paper, in which nodes run for ever.
    """
    known_NN = np.isfinite(rtt_ms_NN)
    np.fill_diagonal(known_NN, False)
    i_E, j_E = np.nonzero(known_NN)
    return fit_pair_coordinates(i_E, j_E, rtt_ms_NN[i_E, j_E], start, rng, rounds=rounds)


def fit_pair_coordinates(
    i_E: Ints,
    j_E: Ints,
    rtt_ms_E: Floats,
    start: NetworkCoordinates,
    rng: np.random.Generator,
    *,
    rounds: int = 800,
) -> NetworkCoordinates:
    """The same for a list of directed pairs, sorted by `i_E`; only the nodes in `i_E` move."""
    degree_N = np.bincount(i_E, minlength=len(start.error_N))
    rows_M = np.flatnonzero(degree_N)
    if not len(rows_M):
        return start
    first_M = np.concatenate(([0], np.cumsum(degree_N)[:-1]))[rows_M]
    cloud = start
    for turn in range(rounds):
        pick_M = first_M + rng.integers(degree_N[rows_M])
        others_M = j_E[pick_M]
        gain = GAIN * min(1.0, 2.0 * (1.0 - turn / rounds))
        moved = update_coordinates(
            cloud.select(rows_M), cloud.select(others_M), rtt_ms_E[pick_M], rng, gain
        )
        cloud = _replace_rows(cloud, rows_M, moved)
    return cloud


def _replace_rows(
    cloud: NetworkCoordinates, rows_M: Ints, new: NetworkCoordinates
) -> NetworkCoordinates:
    arrays = []
    for old_N, new_M in (
        (cloud.position_ms_NK, new.position_ms_NK),
        (cloud.height_ms_N, new.height_ms_N),
        (cloud.error_N, new.error_N),
    ):
        array = old_N.copy()
        array[rows_M] = new_M
        arrays.append(array)
    return NetworkCoordinates(*arrays)


TYPICAL_HEIGHT_MS = 8.0
TYPICAL_STRETCH = 1.6
STRETCH_BOUNDS = (1.0, 3.0)
"""Bounds of the fitted stretch: nothing is faster than light, and detours beyond 3 are rare."""
MIN_FITTED_HEIGHT_MS = 0.1
_ITERATIONS = 5
_RIDGE_WEIGHT = 0.02
_RELATIVE_ERROR_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class HeightFit:
    """`height_ms_N` is each node's access delay; `stretch` the ratio of cable to great circle."""

    height_ms_N: Floats
    stretch: float

    def predict_ms_NN(self, light_ms_NN: Floats) -> Floats:
        rtt_ms_NN = self.stretch * light_ms_NN
        rtt_ms_NN += self.height_ms_N[:, None]
        rtt_ms_NN += self.height_ms_N[None, :]
        return rtt_ms_NN


def fit_heights(rtt_ms_NN: Floats, light_ms_NN: Floats) -> HeightFit:
    """Fit heights and stretch to relative errors, over the pairs that are finite in both arrays.

    Iteratively reweighted least squares, `_ITERATIONS` times, so that a detour counts by its size
    and not by its square. A ridge pulls towards the typical values, which nodes without
    measurements get.
    """
    known_NN = np.isfinite(rtt_ms_NN) & np.isfinite(light_ms_NN)
    i_E, j_E = np.nonzero(np.triu(known_NN, 1))
    return fit_pair_heights(len(rtt_ms_NN), i_E, j_E, rtt_ms_NN[i_E, j_E], light_ms_NN[i_E, j_E])


def fit_pair_heights(
    size: int, i_E: Ints, j_E: Ints, rtt_ms_E: Floats, light_ms_E: Floats
) -> HeightFit:
    """The same for a list of pairs of `size` nodes, each pair once."""
    height_N = np.full(size, TYPICAL_HEIGHT_MS)
    stretch = TYPICAL_STRETCH
    count = len(i_E)
    row_E = np.arange(count)
    ridge = csr_array(
        (np.full(size + 1, _RIDGE_WEIGHT), (np.arange(size + 1), np.arange(size + 1))),
        shape=(size + 1, size + 1),
    )
    prior = _RIDGE_WEIGHT * np.append(height_N, stretch)
    weight_E = 1.0 / np.maximum(rtt_ms_E, 2.0)
    robust_E = np.ones(count)
    for _ in range(_ITERATIONS if count else 0):
        w_E = weight_E * robust_E
        system = csr_array(
            (
                np.concatenate((w_E, w_E, w_E * light_ms_E)),
                (np.tile(row_E, 3), np.concatenate((i_E, j_E, np.full(count, size)))),
            ),
            shape=(count, size + 1),
        )
        wanted = np.concatenate((w_E * rtt_ms_E, prior))
        solution = lsqr(vstack((system, ridge)).tocsr(), wanted, iter_lim=100)[0]
        height_N = np.maximum(solution[:size], MIN_FITTED_HEIGHT_MS)
        stretch = float(np.clip(solution[size], *STRETCH_BOUNDS))
        expected_E = height_N[i_E] + height_N[j_E] + stretch * light_ms_E
        wrong_E = np.abs(expected_E / rtt_ms_E - 1.0)
        robust_E = 1.0 / np.sqrt(np.maximum(wrong_E / _RELATIVE_ERROR_TOLERANCE, 1.0))
    return HeightFit(height_N, stretch)


MAX_CLUSTERS = 256
SHRINKAGE_WEIGHT = 0.5
"""Weight of "no correction", in measurements at distance zero."""
MAX_LOG_CORRECTION = 2.0


def smooth_corrections(
    rtt_ms_NN: Floats,
    expected_ms_NN: Floats,
    distance: Callable[[int], Floats],
    reach: float,
) -> Floats:
    """Correction factors of `expected_ms_NN`, [N, N].

    `distance(node)` gives the distances [N] of all nodes from one. A measurement's weight falls by
    a factor of e per `reach` of distance, at both ends.
    """
    clusters = find_clusters(len(rtt_ms_NN), distance, reach)
    known_NN = np.isfinite(rtt_ms_NN) & (rtt_ms_NN > 0) & (expected_ms_NN > 0)
    np.fill_diagonal(known_NN, False)
    i_E, j_E = np.nonzero(known_NN)
    ratio_E = rtt_ms_NN[i_E, j_E] / expected_ms_NN[i_E, j_E]
    factor_PP = correction_factors(clusters, i_E, j_E, ratio_E, reach)
    factor_NN: Floats = factor_PP[np.ix_(clusters.cluster_N, clusters.cluster_N)]
    return factor_NN


def correction_factors(
    clusters: NodeClusters, i_E: Ints, j_E: Ints, ratio_E: Floats, reach: float
) -> Floats:
    """Correction factors between clusters, [P, P], of directed pairs measured at `ratio_E` times
    what was expected."""
    cluster_N = clusters.cluster_N
    log_PP = np.zeros_like(clusters.apart_PP)
    count_PP = np.zeros_like(log_PP)
    log_E = np.clip(np.log(ratio_E), -MAX_LOG_CORRECTION, MAX_LOG_CORRECTION)
    np.add.at(log_PP, (cluster_N[i_E], cluster_N[j_E]), log_E)
    np.add.at(count_PP, (cluster_N[i_E], cluster_N[j_E]), 1.0)
    weight_PP = np.exp(-clusters.apart_PP / reach)
    smooth_PP = weight_PP @ log_PP @ weight_PP.T
    smooth_PP /= weight_PP @ count_PP @ weight_PP.T + SHRINKAGE_WEIGHT
    factor_PP: Floats = np.exp(smooth_PP)
    return factor_PP


@dataclass(frozen=True, slots=True, eq=False)
class NodeClusters:
    """P clusters of near nodes: the node at the centre of each, the cluster of each node, and the
    distances between centres."""

    centre_P: Ints
    cluster_N: Ints
    apart_PP: Floats


def find_clusters(size: int, distance: Callable[[int], Floats], reach: float) -> NodeClusters:
    """Group nodes of which `distance(node)` gives the distances [N] from one.

    Greedy max-min: the next centre is the node farthest from all centres, until every node is
    within a tenth of `reach` of one or there are `MAX_CLUSTERS`.
    """
    centres: list[int] = []
    columns: list[Floats] = []
    nearest_N = np.full(size, np.inf)
    place_N = np.zeros(size, dtype=np.int64)
    following = 0
    while len(centres) < min(size, MAX_CLUSTERS):
        far_N = distance(following)
        nearer_N = far_N < nearest_N
        place_N[nearer_N] = len(centres)
        nearest_N = np.minimum(nearest_N, far_N)
        centres.append(following)
        columns.append(far_N)
        following = int(np.argmax(nearest_N))
        if nearest_N[following] <= 0.1 * reach:
            break
    apart_PP = np.array([column[centres] for column in columns])
    return NodeClusters(np.array(centres, dtype=np.int64), place_N, apart_PP)


CORRECTION_REACH_KM = 300.0
CORRECTION_REACH_MS = 25.0
"""Distances at which the influence of a measurement falls to 1/e: on the globe, and between network
coordinates."""
MIN_EXPECTED_RTT_MS = 0.1
_PLACED_NODE_ERROR = 0.2
"""Initial relative error of a coordinate that is taken from a known location."""


def expect_from_places(rtt_ms_NN: Floats, places_N2: Floats) -> Floats:
    """Round trips [N, N] in ms from great circles and access links; all places must be known."""
    light_ms_NN = min_rtt_ms(places_N2, places_N2)
    expected_NN = fit_heights(rtt_ms_NN, light_ms_NN).predict_ms_NN(light_ms_NN)

    def distance_km(node: int) -> Floats:
        distance_1N = great_circle_km(places_N2[node : node + 1], places_N2)
        flat_N: Floats = distance_1N[0]
        return flat_N

    expected_NN *= smooth_corrections(rtt_ms_NN, expected_NN, distance_km, CORRECTION_REACH_KM)
    return np.maximum(expected_NN, np.maximum(light_ms_NN, MIN_EXPECTED_RTT_MS), out=expected_NN)


def expect_from_coordinates(
    rtt_ms_NN: Floats, places_N2: Floats, rng: np.random.Generator
) -> Floats:
    """Round trips [N, N] in ms from coordinates fitted to the measurements, starting at places."""
    cloud = _fit_coordinates(rtt_ms_NN, places_N2, rng)
    expected_NN = cloud.predict_ms_NN()

    def distance_ms(node: int) -> Floats:
        apart_NK = cloud.position_ms_NK - cloud.position_ms_NK[node]
        norm_N: Floats = np.linalg.norm(apart_NK, axis=1)
        return norm_N

    expected_NN *= smooth_corrections(rtt_ms_NN, expected_NN, distance_ms, CORRECTION_REACH_MS)
    light_ms_NN = np.fmax(min_rtt_ms(places_N2, places_N2), MIN_EXPECTED_RTT_MS)
    return np.maximum(expected_NN, light_ms_NN, out=expected_NN)


def _fit_coordinates(
    rtt_ms_NN: Floats, places_N2: Floats, rng: np.random.Generator
) -> NetworkCoordinates:
    """Coordinates fitted to the measurements; nodes with a known place start there."""
    size = len(rtt_ms_NN)
    placed_N = np.isfinite(places_N2).all(axis=1)
    fit = HeightFit(np.full(size, TYPICAL_HEIGHT_MS), CABLE_STRETCH)
    if placed_N.any():
        fit = fit_heights(rtt_ms_NN, min_rtt_ms(places_N2, places_N2))
    start = NetworkCoordinates(
        positions_from_places(places_N2) * (fit.stretch / CABLE_STRETCH),
        fit.height_ms_N,
        np.where(placed_N, _PLACED_NODE_ERROR, MAX_ERROR),
    )
    return fit_coordinates(rtt_ms_NN, start, rng)
