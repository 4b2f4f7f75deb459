"""What a round trip is expected to be, from places or from network coordinates. N nodes."""

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
"""How far a measurement's word carries, over the globe and between network coordinates."""
LEAST_RTT_MS = 0.1
_PLACED_ERROR = 0.2
"""How wrong a place is as a coordinate, before anything is measured."""


def from_places(rtt_ms_NN: Floats, places_N2: Floats) -> Floats:
    """From light along great circles, stretched, and access links; every place must be known."""
    light_ms_NN = least_rtt_ms(places_N2, places_N2)
    expected_NN = fit_heights(rtt_ms_NN, light_ms_NN).predict_ms_NN(light_ms_NN)

    def distance_km(node: int) -> Floats:
        distance_1N = great_circle_km(places_N2[node : node + 1], places_N2)
        flat_N: Floats = distance_1N[0]
        return flat_N

    expected_NN *= smooth_corrections(rtt_ms_NN, expected_NN, distance_km, REACH_KM)
    return np.maximum(expected_NN, np.maximum(light_ms_NN, LEAST_RTT_MS), out=expected_NN)


def from_coordinates(rtt_ms_NN: Floats, places_N2: Floats, rng: np.random.Generator) -> Floats:
    """From coordinates that explain the measurements; places, where known, are where they begin."""
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
    """Coordinates that explain the measurements, those of placed nodes near their places."""
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
