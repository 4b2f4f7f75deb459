"""How steadily a node keeps its place in the network, for routing to weigh its reliability with.

A node's median cophenetic height says at which scale it is connected with half of the swarm. Where
that jumps about, its links do. Section 3.1 of the paper would raise R for nodes in long-lived
features without a formula; this is ours, measured against later trouble by `benchmarks stability`.

Legend: T past snapshots, N nodes.
"""

from __future__ import annotations

import warnings

import numpy as np

from nesa_node.topology.homology.filtration import Floats

# A node whose height is half off its own median has half the score.
TOLERANCE = 0.5
LEAST_HISTORY = 5


def height_deviation(height_TN: Floats) -> Floats:
    """[N] float64: the mean distance of a node's heights from their median, relative to it.

    height_TN : [T, N] float64, `median_heights` of past snapshots in any order; NaN where a node was
        not there. Not modified.

    The mean, and not the median distance: trouble is rare, and a robust measure would not see it.
    NaN for nodes with fewer than 5 heights.
    """
    height_TN = np.asarray(height_TN, dtype=np.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # columns that are all NaN
        median_N = np.nanmedian(height_TN, axis=0)
        away_N = np.nanmean(np.abs(height_TN - median_N), axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        relative_N = np.where(median_N > 0, away_N / median_N, 0.0)
    relative_N[np.isfinite(height_TN).sum(axis=0) < LEAST_HISTORY] = np.nan
    return relative_N


def stability_scores(height_TN: Floats, *, tolerance: float = TOLERANCE) -> Floats:
    """[N] float64 in (0, 1], to multiply reliability with: 1 / (1 + deviation / `tolerance`).

    Nodes that are too young to be judged get the median score of those that are not, or 1: neither
    praised nor blamed.
    """
    if tolerance <= 0:
        raise ValueError(f"the tolerance must be positive, not {tolerance}")
    score_N: Floats = 1.0 / (1.0 + height_deviation(height_TN) / tolerance)
    known_N = np.isfinite(score_N)
    score_N[~known_N] = np.median(score_N[known_N]) if known_N.any() else 1.0
    return score_N
