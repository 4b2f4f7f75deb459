"""Pairs that nobody has measured, filled in from those that somebody has.

First what is expected of a pair. Between nodes whose places are known: light along the great circle,
stretched, and both access links (`height_fit`). Otherwise network coordinates (`vivaldi`), which
begin at the places that are known. Then what measured pairs nearby say about such expectations
(`smoothing`). Measured pairs are left alone, and no estimate is faster than light.

`python -m benchmarks estimate` compares this with coordinates alone and with factors of low rank;
`docs/decisions/009` has the figures. N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nesa_node.core.ids import PeerId
from nesa_node.topology.access_rates import fit_access_rates
from nesa_node.topology.geography import great_circle_km, least_rtt_ms
from nesa_node.topology.height_fit import HeightFit, fit_heights
from nesa_node.topology.links import Links, mirror
from nesa_node.topology.smoothing import smooth_corrections
from nesa_node.topology.snapshot import Snapshot
from nesa_node.topology.vivaldi import CABLE, MAX_ERROR, Cloud, places_ms, settle

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

REACH_KM = 300.0
REACH_MS = 25.0
"""How far a measurement's word carries, over the globe and between network coordinates."""
ESTIMATE_CONFIDENCE = 0.3
"""Of an estimate between two nodes that have many measurements; less where they have few."""
_ENOUGH = 4
_LEAST_RTT_MS = 0.1


def fill_snapshot(snapshot: Snapshot, rng: np.random.Generator) -> Snapshot:
    """`snapshot` with links among all its nodes, joining ones included, and no round trip unknown."""
    nodes = (*snapshot.nodes, *snapshot.joining)
    peers = tuple(node.peer_id for node in nodes)
    known = Links.unknown(peers) if snapshot.links is None else snapshot.links.of(peers)
    return replace(snapshot, links=fill(known, [node.location for node in nodes], rng))


def fill(
    links: Links,
    locations: Sequence[tuple[float, float] | None],
    rng: np.random.Generator,
) -> Links:
    """`links` with an estimate wherever a round trip or a rate is unknown.

    `locations`, in the order of `links.peers`, are what operators say. Ages of estimates stay NaN;
    their confidence is at most `ESTIMATE_CONFIDENCE`. Rates stay unknown where neither end was
    ever seen to transfer anything.
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
    """A complete matrix, equal to `rtt_ms_NN` wherever that is finite."""
    measured_NN = np.isfinite(rtt_ms_NN)
    places_N2 = believable(places_N2, rtt_ms_NN)
    placed_N = np.isfinite(places_N2).all(axis=1)
    full_NN = np.empty_like(rtt_ms_NN)
    if not placed_N.all():
        cloud = _coordinates(rtt_ms_NN, places_N2, rng)
        full_NN[:] = _from_coordinates(rtt_ms_NN, cloud)
    if placed_N.any():
        both = np.ix_(placed_N, placed_N)
        full_NN[both] = _from_places(rtt_ms_NN[both], places_N2[placed_N])
    full_NN[measured_NN] = rtt_ms_NN[measured_NN]
    mirror(full_NN)  # sums of the same terms in another order differ in their last bit
    return full_NN


def believable(places_N2: Floats, rtt_ms_NN: Floats) -> Floats:
    """`places_N2` less those from which most measured round trips would have outrun light.

    Of the nodes that disagree, the one with most disagreements goes first: its peers, which told
    the truth, disagree with nobody else.
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


def as_array(locations: Sequence[tuple[float, float] | None]) -> Floats:
    """Degrees, [N, 2]; NaN where nobody says, or says nonsense."""
    places_N2 = np.array([place or (np.nan, np.nan) for place in locations], dtype=np.float64)
    places_N2 = places_N2.reshape(-1, 2)
    nonsense_N = ~((np.abs(places_N2[:, 0]) <= 90) & (np.abs(places_N2[:, 1]) <= 180))
    places_N2[nonsense_N] = np.nan
    return places_N2


def _from_places(rtt_ms_NN: Floats, places_N2: Floats) -> Floats:
    light_ms_NN = least_rtt_ms(places_N2, places_N2)
    expected_NN = fit_heights(rtt_ms_NN, light_ms_NN).predict_ms_NN(light_ms_NN)

    def distance_km(node: int) -> Floats:
        distance_1N = great_circle_km(places_N2[node : node + 1], places_N2)
        flat_N: Floats = distance_1N[0]
        return flat_N

    expected_NN *= smooth_corrections(rtt_ms_NN, expected_NN, distance_km, REACH_KM)
    return np.maximum(expected_NN, np.maximum(light_ms_NN, _LEAST_RTT_MS), out=expected_NN)


def _coordinates(rtt_ms_NN: Floats, places_N2: Floats, rng: np.random.Generator) -> Cloud:
    """Coordinates that explain the measurements, those of placed nodes near their places."""
    size = len(rtt_ms_NN)
    placed_N = np.isfinite(places_N2).all(axis=1)
    fit = HeightFit(np.full(size, 8.0), CABLE)
    if placed_N.any():
        fit = fit_heights(rtt_ms_NN, least_rtt_ms(places_N2, places_N2))
    start = Cloud(
        places_ms(places_N2) * (fit.stretch / CABLE),
        fit.height_ms_N,
        np.where(placed_N, 0.2, MAX_ERROR),
    )
    return settle(rtt_ms_NN, start, rng)


def _from_coordinates(rtt_ms_NN: Floats, cloud: Cloud) -> Floats:
    expected_NN = cloud.predict_ms_NN()

    def distance_ms(node: int) -> Floats:
        apart_NK = cloud.position_ms_NK - cloud.position_ms_NK[node]
        norm_N: Floats = np.linalg.norm(apart_NK, axis=1)
        return norm_N

    expected_NN *= smooth_corrections(rtt_ms_NN, expected_NN, distance_ms, REACH_MS)
    return np.maximum(expected_NN, _LEAST_RTT_MS, out=expected_NN)


def neighbours_to_measure(
    links: Links, peer: PeerId, count: int, rng: np.random.Generator
) -> tuple[PeerId, ...]:
    """Whom `peer` should ping next: half those it knows least, half anybody.

    Least known is least confident. Estimates need far links as much as near ones, so the other half
    is drawn at random.
    """
    row = links.peers.index(peer)
    others = np.array([other for other in range(len(links.peers)) if other != row], dtype=np.int64)
    rng.shuffle(others)
    least = others[np.argsort(links.confidence_NN[row, others], kind="stable")]
    chosen = list(least[: (count + 1) // 2])
    chosen += [other for other in others if other not in set(chosen)][: count - len(chosen)]
    return tuple(links.peers[int(other)] for other in chosen[:count])
