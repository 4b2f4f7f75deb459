"""Estimated transfer rates of unmeasured pairs, from the access links of both ends.

The bottleneck is nearly always one of the two access links, so rate_ij = min(up_i, down_j).

Legend: N nodes, E pairs with a measured rate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_TURNS = 6


@dataclass(frozen=True, slots=True, eq=False)
class AccessRates:
    """Upload and download limit of each node, [N] in bytes/s; NaN without a measurement."""

    up_N: Floats
    down_N: Floats

    def predict_NN(self) -> Floats:
        """Rates [N, N] in bytes/s, rows send; NaN if both ends are unknown, inf on the diagonal.

        An unknown end is replaced by the median of all known ends of the same direction.
        """
        up_N = np.where(np.isnan(self.up_N), _median(self.up_N), self.up_N)
        down_N = np.where(np.isnan(self.down_N), _median(self.down_N), self.down_N)
        rate_NN: Floats = np.minimum(up_N[:, None], down_N[None, :])
        rate_NN[np.isnan(self.up_N)[:, None] & np.isnan(self.down_N)[None, :]] = np.nan
        np.fill_diagonal(rate_NN, np.inf)
        return rate_NN


def fit_access_rates(rate_bytes_per_s_NN: Floats) -> AccessRates:
    """Fit the access links of all nodes to the finite rates of a matrix [N, N] (rows send).

    Starts from each end's fastest transfer, a lower bound of its limit. Each iteration then sets an
    end to the median rate of the transfers in which it was the bottleneck.
    """
    known_NN = np.isfinite(rate_bytes_per_s_NN) & (rate_bytes_per_s_NN > 0)
    np.fill_diagonal(known_NN, False)
    i_E, j_E = np.nonzero(known_NN)
    rate_E = rate_bytes_per_s_NN[i_E, j_E]
    size = len(rate_bytes_per_s_NN)
    up_N, down_N = _fastest(size, i_E, rate_E), _fastest(size, j_E, rate_E)
    for _ in range(_TURNS):
        narrow_E = up_N[i_E] <= down_N[j_E]
        up_N = _medians(up_N, i_E[narrow_E], rate_E[narrow_E])
        narrow_E = down_N[j_E] <= up_N[i_E]
        down_N = _medians(down_N, j_E[narrow_E], rate_E[narrow_E])
    return AccessRates(up_N, down_N)


def _fastest(size: int, end_E: Ints, rate_E: Floats) -> Floats:
    fastest_N = np.full(size, -np.inf)
    np.maximum.at(fastest_N, end_E, rate_E)
    return np.where(np.isinf(fastest_N), np.nan, fastest_N)


def _medians(before_N: Floats, end_E: Ints, rate_E: Floats) -> Floats:
    """Median rate of each end, [N]; `before_N` where it has none."""
    medians_N = before_N.copy()
    order = np.lexsort((rate_E, end_E))
    ends, first, count = np.unique(end_E[order], return_index=True, return_counts=True)
    sorted_E = rate_E[order]
    medians_N[ends] = (sorted_E[first + (count - 1) // 2] + sorted_E[first + count // 2]) / 2
    return medians_N


def _median(values_N: Floats) -> float:
    known = values_N[~np.isnan(values_N)]
    return float(np.median(known)) if len(known) else float("nan")
