"""Estimates for pairs without a measurement, from the measured pairs.

The prior of a pair is one of two: the time of light along the great circle, stretched, plus both
access links (`fit_heights`); or the distance of network coordinates (Vivaldi), which start at the
known locations. Measured pairs nearby correct it (`smooth_corrections`). Pairs with an unknown
location use coordinates; otherwise a trial on held-out measured pairs decides. Measured pairs stay
as they are, and no estimate is faster than light.

`python -m benchmarks estimate` compares this with coordinates alone and with low-rank factors;
`docs/decisions/010` has the figures.

The bottleneck of a transfer is nearly always one of the two access links, so an unmeasured rate_ij
is min(up_i, down_j).

Legend: N nodes, E pairs with a measured rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nesa_node.core.arrays import Bools, Floats, Ints
from nesa_node.topology.geography import drop_implausible, locations_array
from nesa_node.topology.links.expected_rtt import expect_from_coordinates, expect_from_places
from nesa_node.topology.links.matrix import Links, make_symmetric

_ITERATIONS = 6


@dataclass(frozen=True, slots=True, eq=False)
class AccessRates:
    """Upload and download limit of each node, [N] in bytes/s; NaN without a measurement."""

    up_N: Floats
    down_N: Floats

    def predict_NN(self) -> Floats:
        """Rates [N, N] in bytes/s, rows send; NaN if both ends are unknown, inf on the diagonal.

        An unknown end is replaced by the median of all known ends of the same direction.
        """
        up_N = np.where(np.isnan(self.up_N), _median_known(self.up_N), self.up_N)
        down_N = np.where(np.isnan(self.down_N), _median_known(self.down_N), self.down_N)
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
    return fit_pair_rates(len(rate_bytes_per_s_NN), i_E, j_E, rate_bytes_per_s_NN[i_E, j_E])


def fit_pair_rates(size: int, i_E: Ints, j_E: Ints, rate_E: Floats) -> AccessRates:
    """The same for a list of transfers among `size` nodes, `i_E` to `j_E`."""
    up_N, down_N = _max_rate_per_end(size, i_E, rate_E), _max_rate_per_end(size, j_E, rate_E)
    for _ in range(_ITERATIONS):
        narrow_E = up_N[i_E] <= down_N[j_E]
        up_N = _median_rate_per_end(up_N, i_E[narrow_E], rate_E[narrow_E])
        narrow_E = down_N[j_E] <= up_N[i_E]
        down_N = _median_rate_per_end(down_N, j_E[narrow_E], rate_E[narrow_E])
    return AccessRates(up_N, down_N)


def _max_rate_per_end(size: int, end_E: Ints, rate_E: Floats) -> Floats:
    fastest_N = np.full(size, -np.inf)
    np.maximum.at(fastest_N, end_E, rate_E)
    return np.where(np.isinf(fastest_N), np.nan, fastest_N)


def _median_rate_per_end(before_N: Floats, end_E: Ints, rate_E: Floats) -> Floats:
    """Median rate of each end, [N]; `before_N` where it has none."""
    medians_N = before_N.copy()
    order = np.lexsort((rate_E, end_E))
    ends, first, count = np.unique(end_E[order], return_index=True, return_counts=True)
    sorted_E = rate_E[order]
    medians_N[ends] = (sorted_E[first + (count - 1) // 2] + sorted_E[first + count // 2]) / 2
    return medians_N


def _median_known(values_N: Floats) -> float:
    known = values_N[~np.isnan(values_N)]
    return float(np.median(known)) if len(known) else float("nan")


ESTIMATE_CONFIDENCE = 0.3
"""Maximum confidence of an estimate; lower where either node has few measurements."""
MAX_TRIAL_NODES = 300
"""Maximum number of nodes in the trial of places against coordinates."""
HELD_OUT_FRACTION = 0.2
MIN_TRIAL_PAIRS = 5
_HALF_CONFIDENCE_PAIRS = 4


def fill_links(
    links: Links,
    locations: Sequence[tuple[float, float] | None],
    rng: np.random.Generator,
) -> Links:
    """`links` with an estimate for every unknown round trip or rate.

    `locations` are those of `links.peers`, as declared by operators: latitude and longitude in
    degrees. Estimates have age NaN and a confidence of at most `ESTIMATE_CONFIDENCE`. A rate stays
    NaN if neither end has a measured transfer.
    """
    rtt_ms_NN = estimate_rtt_ms(links.rtt_ms_NN, locations_array(locations), rng)
    measured_NN: Bools = np.isfinite(links.rtt_ms_NN)
    rate_NN = np.array(links.rate_bytes_per_s_NN)
    unknown_NN: Bools = np.isnan(rate_NN)
    if unknown_NN.any():
        rate_NN[unknown_NN] = fit_access_rates(rate_NN).predict_NN()[unknown_NN]
    count_N = np.asarray(measured_NN.sum(axis=1), dtype=np.float64) - 1.0
    share_N = ESTIMATE_CONFIDENCE * count_N / (count_N + _HALF_CONFIDENCE_PAIRS)
    confidence_NN = np.minimum(share_N[:, None], share_N[None, :])
    confidence_NN[measured_NN] = links.confidence_NN[measured_NN]
    return Links(links.peers, rtt_ms_NN, rate_NN, links.age_s_NN, confidence_NN)


def estimate_rtt_ms(rtt_ms_NN: Floats, places_N2: Floats, rng: np.random.Generator) -> Floats:
    """A complete symmetric matrix [N, N] in ms, equal to `rtt_ms_NN` wherever that is finite."""
    if not len(rtt_ms_NN):
        return rtt_ms_NN
    measured_NN = np.isfinite(rtt_ms_NN)
    places_N2 = drop_implausible(places_N2, rtt_ms_NN)
    placed_N = np.isfinite(places_N2).all(axis=1)
    full_NN = np.empty_like(rtt_ms_NN)
    by_places = placed_N.any() and places_predict_better(rtt_ms_NN, places_N2, rng)
    if not by_places or not placed_N.all():
        full_NN[:] = expect_from_coordinates(rtt_ms_NN, places_N2, rng)
    if by_places:
        both = np.ix_(placed_N, placed_N)
        full_NN[both] = expect_from_places(rtt_ms_NN[both], places_N2[placed_N])
    full_NN[measured_NN] = rtt_ms_NN[measured_NN]
    make_symmetric(full_NN)  # sums of the same terms in another order differ in their last bit
    return full_NN


def places_predict_better(rtt_ms_NN: Floats, places_N2: Floats, rng: np.random.Generator) -> bool:
    """Whether places predict held-out pairs better than coordinates; True with too few pairs.

    A fifth of the measured pairs between placed nodes is held out, among at most `MAX_TRIAL_NODES`
    nodes. Access links and great circles explain most swarms best; coordinates win where routes do
    not follow geography and many pairs are measured.
    """
    rows = np.flatnonzero(np.isfinite(places_N2).all(axis=1))
    if len(rows) > MAX_TRIAL_NODES:
        rows = np.sort(rng.choice(rows, MAX_TRIAL_NODES, replace=False))
    true_NN, places_N2 = rtt_ms_NN[np.ix_(rows, rows)], places_N2[rows]
    held_NN = np.triu(np.isfinite(true_NN) & (rng.random(true_NN.shape) < HELD_OUT_FRACTION), 1)
    if held_NN.sum() < MIN_TRIAL_PAIRS:
        return True
    shown_NN = np.where(held_NN | held_NN.T, np.nan, true_NN)
    guesses = (
        expect_from_places(shown_NN, places_N2),
        expect_from_coordinates(shown_NN, places_N2, rng),
    )
    errors = [np.median(np.abs(np.log(guess[held_NN] / true_NN[held_NN]))) for guess in guesses]
    return bool(errors[0] <= errors[1])
