"""Declared locations of nodes, checked against the speed of light.

Legend: N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nesa_node.topology.geography import least_rtt_ms

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def as_array(locations: Sequence[tuple[float, float] | None]) -> Floats:
    """Locations in degrees, [N, 2]; NaN where missing or not on the globe."""
    places_N2 = np.array([place or (np.nan, np.nan) for place in locations], dtype=np.float64)
    places_N2 = places_N2.reshape(-1, 2)
    nonsense_N = ~((np.abs(places_N2[:, 0]) <= 90) & (np.abs(places_N2[:, 1]) <= 180))
    places_N2[nonsense_N] = np.nan
    return places_N2


def believable(places_N2: Floats, rtt_ms_NN: Floats) -> Floats:
    """`places_N2`, with NaN for places from which most measured round trips would outrun light.

    The node with the largest share of contradictions is removed first, and shares are recomputed:
    peers with true locations contradict only the false ones.
    """
    kept_N2 = places_N2.copy()
    with np.errstate(invalid="ignore"):
        outrun_NN = rtt_ms_NN < 0.9 * least_rtt_ms(places_N2, places_N2)
    np.fill_diagonal(outrun_NN, False)
    measured_NN: Bools = np.isfinite(rtt_ms_NN)
    while True:
        placed_N: Bools = np.logical_and(*np.isfinite(kept_N2).T)
        outrun_NN &= placed_N[:, None] & placed_N[None, :]
        judged_N = (measured_NN & placed_N[None, :]).sum(axis=1) - 1
        share_N = outrun_NN.sum(axis=1) / np.maximum(judged_N, 1)
        worst = int(np.argmax(share_N)) if len(share_N) else 0
        if not len(share_N) or share_N[worst] <= 0.5:
            return kept_N2
        kept_N2[worst] = np.nan
