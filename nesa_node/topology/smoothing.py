"""What one pair's measurement says about pairs between the neighbours of both of its ends.

A detour of cables is one of regions, not of machines: if a node in Mumbai reaches Frankfurt by way
of the Pacific, so do its neighbours, and to Paris, too. So the logarithm of measured / expected is
averaged over measured pairs, weighted by how near both ends are to the ends of the pair in question
(a kernel smoother over pairs, shrunk towards no correction where little is known).

N nodes in P places, E measured pairs. Nodes are gathered into at most `MAX_PLACES` places, so that
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
"""Weight of "no correction": half of a measurement right there."""
MAX_LOG = 2.0


def smooth_corrections(
    rtt_ms_NN: Floats,
    expected_ms_NN: Floats,
    distance: Callable[[int], Floats],
    reach: float,
) -> Floats:
    """Factors by which to multiply `expected_ms_NN`, [N, N].

    `distance(node)` is how far every node is from that one, [N]; a measurement's weight falls by e
    for every `reach` of it, at both ends.
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
    """Centres far from each other, the number of each node's nearest, and how far centres are.

    The next centre is always the node that is farthest from all (max-min), until every node is
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
