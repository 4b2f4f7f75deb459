"""How steadily a node keeps its place in the network, for routing to weigh its reliability with.

A node's cophenetic height says at which scale it is connected with a share of the swarm. Where that
jumps about, its links do. Section 3.1 of the paper would raise R for nodes in long-lived features
without a formula; this is ours, measured against later trouble by `benchmarks stability`. A share
of a tenth foretells more than a half, which regions' links decide, and no node's own. Where it was
measured a node's round trips at the same quantile foretell as much or more, and uptime alone often
does: both functions take either, and routing should not weigh by heights unseen.

Legend: T past snapshots, N nodes.
"""

from __future__ import annotations

import warnings

import numpy as np

from nesa_node.topology.homology.filtration import Floats

# A node whose height is half off its own median has half the score.
TOLERANCE = 0.5
NEAR = 0.1
LEAST_HISTORY = 5


def height_deviation(height_TN: Floats) -> Floats:
    """[N] float64: the mean distance of a node's heights from their median, relative to it.

    What most nodes' heights do in a snapshot is no node's own, and is taken out first. The mean,
    not the median distance: trouble is rare, and a robust measure would not see it.

    height_TN : [T, N] float64, `quantile_heights(tree, NEAR, cap=...)` of past snapshots in any
        order, or nodes' round trips at that quantile; NaN where a node was not there. Not modified.

    NaN for nodes with fewer than 5 heights.
    """
    height_TN = np.asarray(height_TN, dtype=np.float64)
    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # columns or rows that are all NaN
        median_N = np.nanmedian(height_TN, axis=0)
        ratio_TN = np.where(median_N > 0, height_TN / median_N, height_TN * 0 + 1)
        common_T = np.nanmedian(ratio_TN, axis=1)
        ratio_TN /= np.where(common_T > 0, common_T, 1.0)[:, None]
        relative_N: Floats = np.nanmean(np.abs(ratio_TN - 1), axis=0)
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
