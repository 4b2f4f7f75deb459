"""Low-rank completion of a sparse matrix by alternating least squares.

The control for `smooth_corrections` in `python -m benchmarks estimate`: it uses no locations.

Legend: N nodes, K factors.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def complete_low_rank(
    values_NN: Floats,
    rng: np.random.Generator,
    *,
    rank: int = 3,
    ridge: float = 1.0,
    turns: int = 15,
) -> Floats:
    """A symmetric matrix [N, N] fitted to the finite `values_NN`, near zero elsewhere.

    Minimises the squared error over known entries plus `ridge` times the squared norms of both
    factors, each solved exactly with the other fixed.
    """
    size = len(values_NN)
    known_NN = np.isfinite(values_NN).astype(np.float64)
    filled_NN = np.nan_to_num(values_NN, nan=0.0, posinf=0.0, neginf=0.0)
    left_NK = rng.normal(0.0, 0.1, (size, rank))
    right_NK = rng.normal(0.0, 0.1, (size, rank))
    for _ in range(turns):
        left_NK = _solve(filled_NN, known_NN, right_NK, ridge)
        right_NK = _solve(filled_NN.T, known_NN.T, left_NK, ridge)
    product_NN = left_NK @ right_NK.T
    return np.asarray((product_NN + product_NN.T) / 2, dtype=np.float64)


def fit_biases(values_NN: Floats, *, ridge: float = 1.0, turns: int = 20) -> Floats:
    """The mean of all finite values plus one offset for each row and column, [N, N]."""
    known_NN: Bools = np.isfinite(values_NN)
    mean = float(values_NN[known_NN].mean()) if known_NN.any() else 0.0
    rest_NN = np.where(known_NN, values_NN - mean, 0.0)
    sum_N = rest_NN.sum(axis=1)
    count_N = np.asarray(known_NN.sum(axis=1), dtype=np.float64)
    offset_N: Floats = np.zeros(len(values_NN))
    for _ in range(turns):
        others_N = np.where(known_NN, offset_N[None, :], 0.0).sum(axis=1)
        offset_N += ((sum_N - others_N) / (count_N + ridge) - offset_N) / 2
    return np.asarray(mean + offset_N[:, None] + offset_N[None, :], dtype=np.float64)


def _solve(filled_NN: Floats, known_NN: Floats, factor_NK: Floats, ridge: float) -> Floats:
    size, rank = factor_NK.shape
    outer = (factor_NK[:, :, None] * factor_NK[:, None, :]).reshape(size, rank * rank)
    grams = (known_NN @ outer).reshape(size, rank, rank) + ridge * np.eye(rank)
    right = np.asarray(filled_NN @ factor_NK, dtype=np.float64)[:, :, None]
    return np.asarray(np.linalg.solve(grams, right)[:, :, 0], dtype=np.float64)
