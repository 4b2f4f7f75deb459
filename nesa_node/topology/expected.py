"""Expected round trips, from locations or from network coordinates.

Legend: N nodes, K dimensions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nesa_node.topology.geography import great_circle_km, least_rtt_ms
from nesa_node.topology.height_fit import TYPICAL_HEIGHT_MS, HeightFit, fit_heights
from nesa_node.topology.smoothing import smooth_corrections
from nesa_node.topology.vivaldi import CABLE, MAX_ERROR, Cloud, places_ms, settle

Floats = NDArray[np.float64]

REACH_KM = 300.0
REACH_MS = 25.0
"""Distances at which the influence of a measurement falls to 1/e: on the globe, and between network
coordinates."""
LEAST_RTT_MS = 0.1
_PLACED_ERROR = 0.2
"""Initial relative error of a coordinate that is taken from a known location."""


def from_places(rtt_ms_NN: Floats, places_N2: Floats) -> Floats:
    """Round trips [N, N] in ms from great circles and access links; all places must be known."""
    light_ms_NN = least_rtt_ms(places_N2, places_N2)
    expected_NN = fit_heights(rtt_ms_NN, light_ms_NN).predict_ms_NN(light_ms_NN)

    def distance_km(node: int) -> Floats:
        distance_1N = great_circle_km(places_N2[node : node + 1], places_N2)
        flat_N: Floats = distance_1N[0]
        return flat_N

    expected_NN *= smooth_corrections(rtt_ms_NN, expected_NN, distance_km, REACH_KM)
    return np.maximum(expected_NN, np.maximum(light_ms_NN, LEAST_RTT_MS), out=expected_NN)


def from_coordinates(rtt_ms_NN: Floats, places_N2: Floats, rng: np.random.Generator) -> Floats:
    """Round trips [N, N] in ms from coordinates fitted to the measurements, starting at places."""
    cloud = _coordinates(rtt_ms_NN, places_N2, rng)
    expected_NN = cloud.predict_ms_NN()

    def distance_ms(node: int) -> Floats:
        apart_NK = cloud.position_ms_NK - cloud.position_ms_NK[node]
        norm_N: Floats = np.linalg.norm(apart_NK, axis=1)
        return norm_N

    expected_NN *= smooth_corrections(rtt_ms_NN, expected_NN, distance_ms, REACH_MS)
    light_ms_NN = np.fmax(least_rtt_ms(places_N2, places_N2), LEAST_RTT_MS)
    return np.maximum(expected_NN, light_ms_NN, out=expected_NN)


def _coordinates(rtt_ms_NN: Floats, places_N2: Floats, rng: np.random.Generator) -> Cloud:
    """Coordinates fitted to the measurements; nodes with a known place start there."""
    size = len(rtt_ms_NN)
    placed_N = np.isfinite(places_N2).all(axis=1)
    fit = HeightFit(np.full(size, TYPICAL_HEIGHT_MS), CABLE)
    if placed_N.any():
        fit = fit_heights(rtt_ms_NN, least_rtt_ms(places_N2, places_N2))
    start = Cloud(
        places_ms(places_N2) * (fit.stretch / CABLE),
        fit.height_ms_N,
        np.where(placed_N, _PLACED_ERROR, MAX_ERROR),
    )
    return settle(rtt_ms_NN, start, rng)
