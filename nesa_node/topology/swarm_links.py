"""Links of a swarm file, from regions, locations, access links and stated round trips.

Legend: N nodes, A and B places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nesa_node.core.ids import PeerId
from nesa_node.topology.estimate import estimate_rtt_ms
from nesa_node.topology.geography import least_rtt_ms
from nesa_node.topology.links import Links
from nesa_node.topology.places import as_array
from nesa_node.topology.tables import NAMES, load_table
from nesa_node.topology.vivaldi import CABLE

Floats = NDArray[np.float64]

STATED = 1.0
RECKONED = 0.2
"""Confidence of round trips that the file states, and of those computed from places."""
WITHIN_REGION_MS = 0.5


@dataclass(frozen=True, slots=True)
class Place:
    """Location and access link of a machine; `access_ms` is its round trip to the exchange."""

    region: str | None
    location: tuple[float, float] | None
    access_ms: float
    up_bytes_per_s: float
    down_bytes_per_s: float


def link_up(
    peers: Sequence[PeerId],
    places: Sequence[Place],
    known_ms: Mapping[tuple[PeerId, PeerId], float],
    rng: np.random.Generator,
) -> Links:
    """Links among `peers`: the stated round trip, else one from places, else an estimate."""
    row_of = {peer: row for row, peer in enumerate(peers)}
    rtt_ms_NN = round_trips(places, places)
    rtt_ms_NN = np.fmin(rtt_ms_NN, rtt_ms_NN.T)  # symmetric to the last bit
    confidence_NN = np.full_like(rtt_ms_NN, RECKONED)
    for (one, other), rtt_ms in known_ms.items():
        for pair in ((row_of[one], row_of[other]), (row_of[other], row_of[one])):
            rtt_ms_NN[pair] = rtt_ms
            confidence_NN[pair] = STATED
    np.fill_diagonal(rtt_ms_NN, 0.0)
    np.fill_diagonal(confidence_NN, 1.0)
    confidence_NN[np.isnan(rtt_ms_NN)] = 0.0
    if np.isnan(rtt_ms_NN).any():
        places_N2 = as_array([place.location for place in places])
        rtt_ms_NN = estimate_rtt_ms(rtt_ms_NN, places_N2, rng)
    up_N = np.array([place.up_bytes_per_s for place in places])
    down_N = np.array([place.down_bytes_per_s for place in places])
    rate_NN = np.minimum(up_N[:, None], down_N[None, :])
    np.fill_diagonal(rate_NN, np.inf)
    age_s_NN = np.where(confidence_NN == STATED, 0.0, np.nan)
    return Links(tuple(peers), rtt_ms_NN, rate_NN, age_s_NN, confidence_NN)


def round_trips(ones_A: Sequence[Place], others_B: Sequence[Place]) -> Floats:
    """Round trips between places in ms, [A, B]; NaN where a location is unknown.

    Taken from a table of measurements if it has both regions, else from the great circle.
    """
    here_A2 = as_array([place.location for place in ones_A])
    there_B2 = as_array([place.location for place in others_B])
    rtt_ms_AB = np.maximum(least_rtt_ms(here_A2, there_B2) * CABLE, WITHIN_REGION_MS)
    for name in NAMES:
        table = load_table(name)
        row_of: Mapping[str | None, int]
        row_of = {region.name: row for row, region in enumerate(table.regions)}
        row_A = np.array([row_of.get(place.region, -1) for place in ones_A], dtype=np.int64)
        row_B = np.array([row_of.get(place.region, -1) for place in others_B], dtype=np.int64)
        both_AB = (row_A >= 0)[:, None] & (row_B >= 0)[None, :]
        rtt_ms_AB[both_AB] = table.rtt_ms_RR[np.ix_(row_A, row_B)][both_AB]
    rtt_ms_AB += np.array([place.access_ms for place in ones_A])[:, None]
    rtt_ms_AB += np.array([place.access_ms for place in others_B])[None, :]
    return rtt_ms_AB
