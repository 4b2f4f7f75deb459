"""Links of many thousand nodes, from the few pairs that each has measured.

A matrix of 50,000 nodes by 50,000 would take 20 GB. Here a node has a position, an access delay and
access rates, fitted to the measured pairs by the methods of `expected_rtt.py`; the links of the
nodes that are in question are computed from these. Nodes with a plausible declared place stand
there; a node without one gets network coordinates.

Legend: N nodes in P clusters, E measured pairs, K dimensions, A and B nodes each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nesa_node.core.arrays import Bools, Floats, Ints
from nesa_node.core.ids import PeerId
from nesa_node.topology.geography import EARTH_RADIUS_KM, FIBRE_KM_PER_RTT_MS, unit_vectors
from nesa_node.topology.links.estimate import AccessRates, fit_pair_rates
from nesa_node.topology.links.expected_rtt import (
    CABLE_STRETCH,
    CORRECTION_REACH_MS,
    MAX_ERROR,
    MIN_EXPECTED_RTT_MS,
    SHRINKAGE_WEIGHT,
    TYPICAL_HEIGHT_MS,
    HeightFit,
    NetworkCoordinates,
    correction_factors,
    find_clusters,
    fit_pair_coordinates,
    fit_pair_heights,
    positions_from_places,
)
from nesa_node.topology.links.matrix import Links

_PLACED_ERROR = 0.05
_MIN_JUDGED_PAIRS = 3


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredPairs:
    """E measured pairs of nodes, each once, as indices. Rates are NaN without a transfer."""

    first_E: Ints
    second_E: Ints
    rtt_ms_E: Floats
    forth_bytes_per_s_E: Floats
    back_bytes_per_s_E: Floats


@dataclass(frozen=True, slots=True, eq=False)
class SparseLinks:
    """Estimated links among `peers`, computed on demand.

    The round trip of two nodes is the distance of their positions and both heights (access delays),
    times the correction between their clusters. Rates are limited by both access links.
    """

    peers: tuple[PeerId, ...]
    position_ms_NK: Floats
    height_ms_N: Floats
    cluster_N: Ints
    centre_ms_PK: Floats
    factor_PP: Floats
    rates: AccessRates

    def __len__(self) -> int:
        return len(self.peers)

    def rtt_ms(self, rows_A: Ints, columns_B: Ints) -> Floats:
        """Round trips in ms, [A, B]; 0 between a node and itself."""
        apart_AB = _distances(self.position_ms_NK[rows_A], self.position_ms_NK[columns_B])
        apart_AB += self.height_ms_N[rows_A, None]
        apart_AB += self.height_ms_N[columns_B]
        apart_AB *= self.factor_PP[self.cluster_N[rows_A, None], self.cluster_N[columns_B]]
        apart_AB[rows_A[:, None] == columns_B] = 0.0
        return apart_AB

    def restrict(self, rows: Ints) -> SparseLinks:
        """The same estimates for some of the nodes, in that order."""
        return SparseLinks(
            tuple(self.peers[row] for row in rows.tolist()),
            self.position_ms_NK[rows],
            self.height_ms_N[rows],
            self.cluster_N[rows],
            self.centre_ms_PK,
            self.factor_PP,
            AccessRates(self.rates.up_N[rows], self.rates.down_N[rows]),
        )

    def select(self, rows: Ints) -> Links:
        """Links among a few nodes, in that order."""
        rtt_ms_NN = self.rtt_ms(rows, rows)
        rtt_ms_NN = np.fmin(rtt_ms_NN, rtt_ms_NN.T)  # symmetric to the last bit
        return Links(
            tuple(self.peers[row] for row in rows.tolist()),
            rtt_ms_NN,
            AccessRates(self.rates.up_N[rows], self.rates.down_N[rows]).predict_NN(),
            np.broadcast_to(np.nan, rtt_ms_NN.shape),
            np.broadcast_to(0.0, rtt_ms_NN.shape),
        )

    def backbone_ms_PP(self) -> Floats:
        """Round trips between clusters without access delays, [P, P], symmetric."""
        apart_PP = _distances(self.centre_ms_PK, self.centre_ms_PK) * self.factor_PP
        np.maximum(apart_PP, MIN_EXPECTED_RTT_MS, out=apart_PP)
        np.fill_diagonal(apart_PP, 0.0)
        return np.asarray(np.fmin(apart_PP, apart_PP.T))

    def expect_from(self, rows_A: Ints, rtt_ms_A: Floats) -> Floats:
        """Round trips [N] from a machine that has measured `rtt_ms_A` to a few nodes.

        It is taken to stand in the cluster, with the access delay, that explain these best (least
        mean of the logarithmic errors). The errors that remain correct what is near the nodes that
        show them.
        """
        cluster_A = self.cluster_N[rows_A]
        apart_PA = _distances(self.centre_ms_PK, self.position_ms_NK[rows_A])
        apart_PA += self.height_ms_N[rows_A]
        apart_PA *= self.factor_PP[:, cluster_A]
        own_P = np.maximum(np.median(rtt_ms_A - apart_PA, axis=1), MIN_EXPECTED_RTT_MS)
        log_PA = np.log(rtt_ms_A / (apart_PA + own_P[:, None]))
        best = int(np.abs(log_PA).mean(axis=1).argmin())
        apart_PP = _distances(self.centre_ms_PK, self.centre_ms_PK)
        weight_PA = np.exp(-apart_PP[:, cluster_A] / CORRECTION_REACH_MS)
        log_P = weight_PA @ log_PA[best] / (weight_PA.sum(axis=1) + SHRINKAGE_WEIGHT)
        apart_N = _distances(self.centre_ms_PK[best : best + 1], self.position_ms_NK)[0]
        expected_N: Floats = (apart_N + self.height_ms_N) * self.factor_PP[best, self.cluster_N]
        expected_N += own_P[best]
        expected_N *= np.exp(log_P)[self.cluster_N]
        expected_N[rows_A] = rtt_ms_A
        return expected_N


def _distances(position_AK: Floats, position_BK: Floats) -> Floats:
    square_AB = position_AK @ position_BK.T
    square_AB *= -2.0
    square_AB += np.einsum("ak,ak->a", position_AK, position_AK)[:, None]
    square_AB += np.einsum("bk,bk->b", position_BK, position_BK)
    distance_AB: Floats = np.sqrt(np.maximum(square_AB, 0.0, out=square_AB), out=square_AB)
    return distance_AB


def estimate_sparse_links(
    peers: Sequence[PeerId], places_N2: Floats, pairs: MeasuredPairs, rng: np.random.Generator
) -> SparseLinks:
    """Fit the links of all `peers` to `pairs`.

    `places_N2`: declared latitudes and longitudes in degrees, NaN without one. A place from which
    most of a node's measured round trips would outrun light is ignored.
    """
    size = len(peers)
    first_E, second_E = pairs.first_E, pairs.second_E
    light_ms_E = _light_ms(places_N2, first_E, second_E)
    placed_N = np.isfinite(places_N2).all(axis=1)
    placed_N &= ~_outrunning(size, pairs, light_ms_E)
    both_E = placed_N[first_E] & placed_N[second_E]
    fit = HeightFit(np.full(size, TYPICAL_HEIGHT_MS), CABLE_STRETCH)
    if both_E.any():
        kept = (first_E[both_E], second_E[both_E], pairs.rtt_ms_E[both_E], light_ms_E[both_E])
        fit = fit_pair_heights(size, *kept)
    start = NetworkCoordinates(
        positions_from_places(np.where(placed_N[:, None], places_N2, np.nan))
        * (fit.stretch / CABLE_STRETCH),
        fit.height_ms_N,
        np.where(placed_N, _PLACED_ERROR, MAX_ERROR),
    )
    # Each pair from either end, of the nodes that have to find their position.
    i_F = np.concatenate((first_E, second_E))
    j_F = np.concatenate((second_E, first_E))
    rtt_ms_F = np.concatenate((pairs.rtt_ms_E, pairs.rtt_ms_E))
    moving = np.flatnonzero(~placed_N[i_F])
    moving = moving[np.argsort(i_F[moving], kind="stable")]
    cloud = fit_pair_coordinates(i_F[moving], j_F[moving], rtt_ms_F[moving], start, rng)
    position_NK, height_N = cloud.position_ms_NK, cloud.height_ms_N

    def distance_ms(node: int) -> Floats:
        distance_N: Floats = _distances(position_NK[node : node + 1], position_NK)[0]
        return distance_N

    clusters = find_clusters(size, distance_ms, CORRECTION_REACH_MS)
    expected_F = np.linalg.norm(position_NK[i_F] - position_NK[j_F], axis=1)
    expected_F += height_N[i_F] + height_N[j_F]
    ratio_F = rtt_ms_F / np.maximum(expected_F, MIN_EXPECTED_RTT_MS)
    factor_PP = correction_factors(clusters, i_F, j_F, ratio_F, CORRECTION_REACH_MS)
    rate_F = np.concatenate((pairs.forth_bytes_per_s_E, pairs.back_bytes_per_s_E))
    timed = np.flatnonzero(rate_F > 0)
    rates = fit_pair_rates(size, i_F[timed], j_F[timed], rate_F[timed])
    return SparseLinks(
        tuple(peers),
        position_NK,
        height_N,
        clusters.cluster_N,
        position_NK[clusters.centre_P],
        factor_PP,
        rates,
    )


def _light_ms(places_N2: Floats, first_E: Ints, second_E: Ints) -> Floats:
    """Least round trips of pairs, [E] in ms; NaN where a place is unknown."""
    places_N3 = unit_vectors(places_N2)
    cosine_E = np.einsum("ek,ek->e", places_N3[first_E], places_N3[second_E])
    angle_E = np.arccos(np.clip(cosine_E, -1.0, 1.0))
    return np.asarray(angle_E * (EARTH_RADIUS_KM / FIBRE_KM_PER_RTT_MS))


def _outrunning(size: int, pairs: MeasuredPairs, light_ms_E: Floats) -> Bools:
    """The nodes from whose place most of at least three round trips would outrun light."""
    with np.errstate(invalid="ignore"):
        outrun_E = pairs.rtt_ms_E < 0.9 * light_ms_E
    ends_F = np.concatenate((pairs.first_E, pairs.second_E))
    known_F = np.tile(np.isfinite(light_ms_E), 2)
    judged_N = np.bincount(ends_F[known_F], minlength=size)
    outrun_N = np.bincount(ends_F[np.tile(outrun_E, 2)], minlength=size)
    return np.asarray((judged_N >= _MIN_JUDGED_PAIRS) & (outrun_N > 0.5 * judged_N))
