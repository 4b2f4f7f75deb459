"""Vivaldi network coordinates, fitted to the measured round trips.

Dabek et al., "Vivaldi: a decentralized network coordinate system", SIGCOMM 2004, with heights: the
round trip between two nodes is the distance of their positions plus both heights, which stand for
access links. Each measurement moves coordinates a little. The planner fits all of them at once;
daemons announce none.

Claimed measurements may be false, so one moves a node by at most `MAX_STEP_MS` (attacks: Kaafar et
al., "Real attacks on virtual networks", 2006).

Legend: N nodes, M nodes with a neighbour, K dimensions, E directed measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nesa_node.core.arrays import Floats, Ints
from nesa_node.topology.geography import EARTH_RADIUS_KM, FIBRE_KM_PER_RTT_MS, unit_vectors

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
    degree_N = known_NN.sum(axis=1)
    rows_M = np.flatnonzero(degree_N)
    if not len(rows_M):
        return start
    neighbours_E = np.nonzero(known_NN)[1]
    first_M = np.concatenate(([0], np.cumsum(degree_N)[:-1]))[rows_M]
    cloud = start
    for turn in range(rounds):
        pick_M = first_M + rng.integers(degree_N[rows_M])
        others_M = neighbours_E[pick_M]
        gain = GAIN * min(1.0, 2.0 * (1.0 - turn / rounds))
        moved = update_coordinates(
            cloud.select(rows_M), cloud.select(others_M), rtt_ms_NN[rows_M, others_M], rng, gain
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
