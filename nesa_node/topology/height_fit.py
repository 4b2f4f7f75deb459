"""Least-squares fit of round trips: height_i + height_j + stretch x light time on a great circle.

The prior of every estimate between nodes with known locations.

Legend: N nodes, E measured pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack
from scipy.sparse.linalg import lsqr

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

TYPICAL_HEIGHT_MS = 8.0
TYPICAL_STRETCH = 1.6
STRETCHES = (1.0, 3.0)
"""Bounds of the fitted stretch: nothing is faster than light, and detours beyond 3 are rare."""
LEAST_HEIGHT_MS = 0.1
_TURNS = 5
_RIDGE = 0.02
_TOLERANCE = 0.05


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

    Iteratively reweighted least squares, `_TURNS` times, so that a detour counts by its size and
    not by its square. A ridge pulls towards the typical values, which nodes without measurements
    get.
    """
    size = len(rtt_ms_NN)
    known_NN = np.isfinite(rtt_ms_NN) & np.isfinite(light_ms_NN)
    i_E, j_E = np.nonzero(np.triu(known_NN, 1))
    rtt_ms_E, light_ms_E = rtt_ms_NN[i_E, j_E], light_ms_NN[i_E, j_E]
    height_N = np.full(size, TYPICAL_HEIGHT_MS)
    stretch = TYPICAL_STRETCH
    count = len(i_E)
    row_E = np.arange(count)
    ridge = csr_array(
        (np.full(size + 1, _RIDGE), (np.arange(size + 1), np.arange(size + 1))),
        shape=(size + 1, size + 1),
    )
    prior = _RIDGE * np.append(height_N, stretch)
    weight_E = 1.0 / np.maximum(rtt_ms_E, 2.0)
    robust_E = np.ones(count)
    for _ in range(_TURNS if count else 0):
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
        height_N = np.maximum(solution[:size], LEAST_HEIGHT_MS)
        stretch = float(np.clip(solution[size], *STRETCHES))
        expected_E = height_N[i_E] + height_N[j_E] + stretch * light_ms_E
        wrong_E = np.abs(expected_E / rtt_ms_E - 1.0)
        robust_E = 1.0 / np.sqrt(np.maximum(wrong_E / _TOLERANCE, 1.0))
    return HeightFit(height_N, stretch)
