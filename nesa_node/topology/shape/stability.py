"""Stability of nodes: how little their cophenetic heights vary over time.

A node's height is the scale at which it is connected with a share of the swarm; it varies when the
node's links do. Section 3.1 of the paper raises R for nodes in long-lived features but prints no
formula; this one is ours, and `benchmarks stability` compares it with later failures. A share of a
tenth predicts better than a half, which depends on links between regions. A node's round trips at
the same quantile predict as well or better where measured, and often uptime alone does: the
functions over arrays accept either.

Legend: T past snapshots, N nodes.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from nesa_node.core.arrays import Floats
from nesa_node.core.ids import PeerId
from nesa_node.topology.shape.merge_tree import (
    merge_tree,
    quantile_heights,
    round_trip_filtration,
)
from nesa_node.topology.snapshot import Snapshot

# Deviation at which the score is a half.
DEVIATION_TOLERANCE = 0.5
NEIGHBOURHOOD_QUANTILE = 0.1
MIN_HEIGHTS = 5


def height_deviation(height_TN: Floats) -> Floats:
    """Mean distance of a node's heights from their median, relative to it, [N] float64.

    The median change of all nodes in a snapshot is divided out first. It is the mean distance, not
    the median: failures are rare, and a robust measure would miss them.

    height_TN : [T, N] float64, `quantile_heights(tree, NEIGHBOURHOOD_QUANTILE, cap=...)` of past
    snapshots in any
        order, or nodes' round trips at that quantile; NaN where a node was absent. Not modified.

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
    relative_N[np.isfinite(height_TN).sum(axis=0) < MIN_HEIGHTS] = np.nan
    return relative_N


def stability_scores(height_TN: Floats, *, tolerance: float = DEVIATION_TOLERANCE) -> Floats:
    """Factors of reliability in (0, 1], [N] float64: 1 / (1 + deviation / `tolerance`).

    Nodes with too few heights get the median score of the other nodes, or 1.
    """
    if tolerance <= 0:
        raise ValueError(f"the tolerance must be positive, not {tolerance}")
    score_N: Floats = 1.0 / (1.0 + height_deviation(height_TN) / tolerance)
    known_N = np.isfinite(score_N)
    score_N[~known_N] = np.median(score_N[known_N]) if known_N.any() else 1.0
    return score_N


MAX_HEIGHTS = 60
"""Most past snapshots whose heights are kept."""
_UNREACHABLE_FACTOR = 10.0
"""Height of a node without any link, in median round trips."""

ConnectionHeights = Mapping[PeerId, float]


def connection_heights(snapshot: Snapshot) -> dict[PeerId, float]:
    """Round trip in ms at which each serving node is connected with a tenth of the other nodes.

    Takes about 1 ms for 30 nodes and time quadratic in the nodes.
    """
    if not snapshot.nodes:
        return {}
    filtration = round_trip_filtration(snapshot)
    cap = _UNREACHABLE_FACTOR * filtration.median_weight()
    height_N = quantile_heights(merge_tree(filtration), NEIGHBOURHOOD_QUANTILE, cap=cap)
    peers = (node.peer_id for node in snapshot.nodes)
    return dict(zip(peers, height_N.tolist(), strict=True))


def node_stability(
    heights: Sequence[ConnectionHeights], peers: Sequence[PeerId]
) -> dict[PeerId, float]:
    """`stability_scores` of `peers` by their heights in past snapshots; {} without any."""
    if not heights or not peers:
        return {}
    height_TN = np.array([[past.get(peer, np.nan) for peer in peers] for past in heights])
    return dict(zip(peers, stability_scores(height_TN).tolist(), strict=True))
