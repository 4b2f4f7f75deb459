"""Kernel smoother over pairs: corrects expected round trips by measurements of nearby pairs.

Cable detours belong to regions, not to machines: if a node in Mumbai reaches Frankfurt across the
Pacific, so do its neighbours, and to Paris, too. So log(measured / expected) is averaged over
measured pairs, weighted by the distance of both ends to those of the pair in question, and shrunk
towards no correction where few pairs are measured.

Legend: N nodes in P clusters, E measured pairs. There are at most `MAX_PLACES` clusters, so that
5,000 nodes cost as little as 200.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_PLACES = 256
SHRINK = 0.5
"""Weight of "no correction", in measurements at distance zero."""
MAX_LOG = 2.0


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
    centres, place_N, apart_PP = _gather(len(rtt_ms_NN), distance, reach)
    log_PP = np.zeros((len(centres), len(centres)))
    count_PP = np.zeros_like(log_PP)
    known_NN = np.isfinite(rtt_ms_NN) & (rtt_ms_NN > 0) & (expected_ms_NN > 0)
    np.fill_diagonal(known_NN, False)
    i_E, j_E = np.nonzero(known_NN)
    log_E = np.clip(np.log(rtt_ms_NN[i_E, j_E] / expected_ms_NN[i_E, j_E]), -MAX_LOG, MAX_LOG)
    np.add.at(log_PP, (place_N[i_E], place_N[j_E]), log_E)
    np.add.at(count_PP, (place_N[i_E], place_N[j_E]), 1.0)
    weight_PP = np.exp(-apart_PP / reach)
    smooth_PP = weight_PP @ log_PP @ weight_PP.T
    smooth_PP /= weight_PP @ count_PP @ weight_PP.T + SHRINK
    factor_NN: Floats = np.exp(smooth_PP)[np.ix_(place_N, place_N)]
    return factor_NN


def _gather(
    size: int, distance: Callable[[int], Floats], reach: float
) -> tuple[list[int], Ints, Floats]:
    """Cluster centres, the cluster of each node [N], and the distances between centres [P, P].

    Greedy max-min: the next centre is the node farthest from all centres, until every node is
    within a tenth of `reach` of one or there are `MAX_PLACES`.
    """
    centres: list[int] = []
    columns: list[Floats] = []
    nearest_N = np.full(size, np.inf)
    place_N = np.zeros(size, dtype=np.int64)
    following = 0
    while len(centres) < min(size, MAX_PLACES):
        far_N = distance(following)
        nearer_N = far_N < nearest_N
        place_N[nearer_N] = len(centres)
        nearest_N = np.minimum(nearest_N, far_N)
        centres.append(following)
        columns.append(far_N)
        following = int(np.argmax(nearest_N))
        if nearest_N[following] <= 0.1 * reach:
            break
    return centres, place_N, np.array([column[centres] for column in columns])
