"""Estimates for pairs without a measurement, from the measured pairs.

The prior of a pair is one of two: the time of light along the great circle, stretched, plus both
access links (`height_fit`); or the distance of network coordinates (`vivaldi`), which start at the
known locations. Measured pairs nearby correct it (`smoothing`). Pairs with an unknown location use
coordinates; otherwise a trial on held-out measured pairs decides. Measured pairs stay as they are,
and no estimate is faster than light.

`python -m benchmarks estimate` compares this with coordinates alone and with low-rank factors;
`docs/decisions/010` has the figures.

Legend: N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nesa_node.topology.access_rates import fit_access_rates
from nesa_node.topology.expected import from_coordinates, from_places
from nesa_node.topology.links import Links, mirror
from nesa_node.topology.places import as_array, believable

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

ESTIMATE_CONFIDENCE = 0.3
"""Maximum confidence of an estimate; lower where either node has few measurements."""
TRIAL_NODES = 300
"""Maximum number of nodes in the trial of places against coordinates."""
HELD_OUT = 0.2
LEAST_TRIAL = 5
_ENOUGH = 4


def fill(
    links: Links,
    locations: Sequence[tuple[float, float] | None],
    rng: np.random.Generator,
) -> Links:
    """`links` with an estimate for every unknown round trip or rate.

    `locations` are those of `links.peers`, as declared by operators: latitude and longitude in
    degrees. Estimates have age NaN and a confidence of at most `ESTIMATE_CONFIDENCE`. A rate stays
    NaN if neither end has a measured transfer.
    """
    rtt_ms_NN = estimate_rtt_ms(links.rtt_ms_NN, as_array(locations), rng)
    measured_NN: Bools = np.isfinite(links.rtt_ms_NN)
    rate_NN = np.array(links.rate_bytes_per_s_NN)
    unknown_NN: Bools = np.isnan(rate_NN)
    if unknown_NN.any():
        rate_NN[unknown_NN] = fit_access_rates(rate_NN).predict_NN()[unknown_NN]
    count_N = np.asarray(measured_NN.sum(axis=1), dtype=np.float64) - 1.0
    share_N = ESTIMATE_CONFIDENCE * count_N / (count_N + _ENOUGH)
    confidence_NN = np.minimum(share_N[:, None], share_N[None, :])
    confidence_NN[measured_NN] = links.confidence_NN[measured_NN]
    return Links(links.peers, rtt_ms_NN, rate_NN, links.age_s_NN, confidence_NN)


def estimate_rtt_ms(rtt_ms_NN: Floats, places_N2: Floats, rng: np.random.Generator) -> Floats:
    """A complete symmetric matrix [N, N] in ms, equal to `rtt_ms_NN` wherever that is finite."""
    if not len(rtt_ms_NN):
        return rtt_ms_NN
    measured_NN = np.isfinite(rtt_ms_NN)
    places_N2 = believable(places_N2, rtt_ms_NN)
    placed_N = np.isfinite(places_N2).all(axis=1)
    full_NN = np.empty_like(rtt_ms_NN)
    by_places = placed_N.any() and places_win(rtt_ms_NN, places_N2, rng)
    if not by_places or not placed_N.all():
        full_NN[:] = from_coordinates(rtt_ms_NN, places_N2, rng)
    if by_places:
        both = np.ix_(placed_N, placed_N)
        full_NN[both] = from_places(rtt_ms_NN[both], places_N2[placed_N])
    full_NN[measured_NN] = rtt_ms_NN[measured_NN]
    mirror(full_NN)  # sums of the same terms in another order differ in their last bit
    return full_NN


def places_win(rtt_ms_NN: Floats, places_N2: Floats, rng: np.random.Generator) -> bool:
    """Whether places predict held-out pairs better than coordinates; True with too few pairs.

    A fifth of the measured pairs between placed nodes is held out, among at most `TRIAL_NODES`
    nodes. Access links and great circles explain most swarms best; coordinates win where routes do
    not follow geography and many pairs are measured.
    """
    rows = np.flatnonzero(np.isfinite(places_N2).all(axis=1))
    if len(rows) > TRIAL_NODES:
        rows = np.sort(rng.choice(rows, TRIAL_NODES, replace=False))
    true_NN, places_N2 = rtt_ms_NN[np.ix_(rows, rows)], places_N2[rows]
    held_NN = np.triu(np.isfinite(true_NN) & (rng.random(true_NN.shape) < HELD_OUT), 1)
    if held_NN.sum() < LEAST_TRIAL:
        return True
    shown_NN = np.where(held_NN | held_NN.T, np.nan, true_NN)
    guesses = (from_places(shown_NN, places_N2), from_coordinates(shown_NN, places_N2, rng))
    errors = [np.median(np.abs(np.log(guess[held_NN] / true_NN[held_NN]))) for guess in guesses]
    return bool(errors[0] <= errors[1])
