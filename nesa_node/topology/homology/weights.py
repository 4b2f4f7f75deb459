"""Filtrations of a swarm by round trip, step time or distance.

Legend: N nodes.
"""

from __future__ import annotations

import numpy as np

from nesa_node.topology.homology.filtration import (
    Filtration,
    Floats,
    make_filtration,
    row_blocks,
)
from nesa_node.topology.links import Links
from nesa_node.topology.snapshot import Snapshot

EARTH_RADIUS_KM = 6371.0088


def round_trip_filtration(snapshot: Snapshot) -> Filtration:
    """Filtration of the serving nodes by round trip in ms; unknown pairs have no edge."""
    peers = tuple(node.peer_id for node in snapshot.nodes)
    links = (snapshot.links or Links.unknown(peers)).of(peers)
    return make_filtration(np.where(np.isnan(links.rtt_ms_NN), np.inf, links.rtt_ms_NN))


def network_filtration(
    round_trip_s_NN: Floats,
    *,
    bytes_per_s_NN: Floats | None = None,
    message_nbytes: float = 0.0,
    compute_s_N: Floats | None = None,
) -> Filtration:
    """Filtration by seconds: a node is born at its compute time, an edge at a step's time over it.

    weight = round trip / 2 + message / bandwidth + compute of both ends, so that no edge is born
    before its ends. Section 3.1 of the paper fixes only "strongest connections first"; it prints no
    formula.

    round_trip_s_NN, bytes_per_s_NN : [N, N] float64, symmetric. No edge: inf and 0. Not modified.
    compute_s_N : [N] float64, seconds that one step takes a node; 0 if not given.

    Raises `ValueError` as `make_filtration` does, and for times or rates that are negative.
    """
    weight_NN = np.array(round_trip_s_NN, dtype=np.float64)
    compute_N = None if compute_s_N is None else np.asarray(compute_s_N, dtype=np.float64)
    if compute_N is not None and np.any(compute_N < 0):
        raise ValueError("a compute time is negative")
    for start, rows in row_blocks(weight_NN):
        rows /= 2
        if bytes_per_s_NN is not None and message_nbytes > 0:
            rate = np.asarray(bytes_per_s_NN[start : start + len(rows)])
            if np.any(rate < 0):
                raise ValueError("a bandwidth is negative; give 0 where there is no link")
            with np.errstate(divide="ignore"):
                rows += message_nbytes / rate
        if compute_N is not None:
            # Both ends are added first: that is symmetric to the last bit.
            rows += compute_N[start : start + len(rows), None] + compute_N
    np.fill_diagonal(weight_NN, 0.0)
    return make_filtration(weight_NN, compute_N)


def geographic_filtration(latitude_N: Floats, longitude_N: Floats) -> Filtration:
    """Filtration by great-circle km (haversine), from degrees. All nodes are born at 0.

    Raises `ValueError` for places that are not on the globe; leave out nodes without a location.
    """
    latitude_N = np.asarray(latitude_N, dtype=np.float64)
    longitude_N = np.asarray(longitude_N, dtype=np.float64)
    on_globe = (np.abs(latitude_N) <= 90) & (np.abs(longitude_N) <= 180)
    if latitude_N.shape != longitude_N.shape or latitude_N.ndim != 1 or not on_globe.all():
        raise ValueError(
            "places are degrees: latitudes to 90, longitudes to 180, one each per node"
        )
    lat_N, lon_N = np.radians(latitude_N), np.radians(longitude_N)
    haversine_NN = np.sin((lat_N[:, None] - lat_N) / 2) ** 2
    across_NN = np.sin((lon_N[:, None] - lon_N) / 2) ** 2
    # cos(a) * cos(b) is the same for both directions; (cos(a) * x) * cos(b) need not be.
    across_NN *= np.outer(np.cos(lat_N), np.cos(lat_N))
    haversine_NN += across_NN
    np.sqrt(np.clip(haversine_NN, 0.0, 1.0, out=haversine_NN), out=haversine_NN)
    np.arcsin(haversine_NN, out=haversine_NN)
    haversine_NN *= 2 * EARTH_RADIUS_KM
    return make_filtration(haversine_NN)
