"""Symmetric links from directed measurements: one round trip per pair, and its confidence.

Legend: N nodes. Row i, column j of a directed array is what i measured to j: the median of its last
pings.

Both ends measure the same round trip; they differ by the queueing delay inside the busier end,
which only adds. So the smaller of the two medians counts. (On the Seattle testbed it is 16 % off
the next minutes' round trip, in the median; the mean of both is 37 % off, the larger 53 %.)
Triangle violations are kept: packets do take detours.

A node can claim round trips that are too small, to attract traffic, but cannot make its peers
measure less than the network takes. If its claims are, in the median, below half of what its peers
measured, they are ignored and the peers' measurements count. (That hits 0.4 of Seattle's 99 honest
nodes; the error grows to 16.1 %.)

Link matrix of a swarm, assembled from the measurements in all node records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from nesa_node.core.arrays import Bools, Floats
from nesa_node.core.ids import PeerId
from nesa_node.topology.links.matrix import Links
from nesa_node.topology.links.packed import MeasuredLink, peer_digest

MAX_AGE_DIFFERENCE_S = 600.0
"""A measurement that is older than the other end's by more than this is ignored."""
CONFIDENCE_HALF_LIFE_S = 1800.0
"""Time in which confidence halves; routes change within hours."""
ONE_SIDED_CONFIDENCE = 0.7
"""Confidence of a pair that only one end has measured."""
MIN_RTT_MS = 0.01
MAX_RTT_MS = 60_000.0
_IMPLAUSIBLE_RATIO = 0.5
_MIN_JUDGED_PAIRS = 3


def links_from_measurements(
    peers: Sequence[PeerId],
    rtt_ms_NN: Floats,
    age_s_NN: Floats,
    rate_bytes_per_s_NN: Floats | None = None,
) -> Links:
    """Links of `peers` from directed measurements [N, N], NaN where there is none.

    Round trips outside 0.01 ms to one minute, and rates that are not positive, are ignored.
    """
    rtt_NN, age_NN, ends_NN = symmetrize_measurements(rtt_ms_NN, age_s_NN)
    rate_NN = np.full_like(rtt_NN, np.nan)
    if rate_bytes_per_s_NN is not None:
        sane_NN = rate_bytes_per_s_NN > 0
        rate_NN[sane_NN] = rate_bytes_per_s_NN[sane_NN]
    np.fill_diagonal(rate_NN, np.inf)
    confidence_NN = np.where(ends_NN == 2, 1.0, ONE_SIDED_CONFIDENCE) * 0.5 ** (
        age_NN / CONFIDENCE_HALF_LIFE_S
    )
    confidence_NN[ends_NN == 0] = 0.0
    np.fill_diagonal(confidence_NN, 1.0)
    return Links(tuple(peers), rtt_NN, rate_NN, age_NN, confidence_NN)


def symmetrize_measurements(
    rtt_ms_NN: Floats, age_s_NN: Floats
) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Symmetric round trips and ages, NaN if unmeasured, and the number of measuring ends."""
    sane_NN = (rtt_ms_NN >= MIN_RTT_MS) & (rtt_ms_NN <= MAX_RTT_MS) & (age_s_NN >= 0)
    np.fill_diagonal(sane_NN, False)
    sane_NN &= ~(_underreporting_nodes(np.where(sane_NN, rtt_ms_NN, np.nan))[:, None] & sane_NN.T)
    sane_NN &= ~(sane_NN.T & (age_s_NN > age_s_NN.T + MAX_AGE_DIFFERENCE_S))
    own_NN = np.where(sane_NN, rtt_ms_NN, np.nan)
    rtt_NN = np.fmin(own_NN, own_NN.T)
    age_NN = np.where(sane_NN, age_s_NN, np.nan)
    age_NN = np.fmin(age_NN, age_NN.T)
    np.fill_diagonal(rtt_NN, 0.0)
    np.fill_diagonal(age_NN, 0.0)
    return rtt_NN, age_NN, sane_NN.astype(np.int64) + sane_NN.T


def _underreporting_nodes(rtt_ms_NN: Floats) -> Bools:
    """Which nodes claim much smaller round trips than their peers measured, [N]."""
    ratio_NN = rtt_ms_NN / rtt_ms_NN.T
    found_N = np.zeros(len(rtt_ms_NN), dtype=bool)
    for node in np.flatnonzero(np.isfinite(ratio_NN).sum(axis=1) >= _MIN_JUDGED_PAIRS):
        found_N[node] = np.nanmedian(ratio_NN[node]) < _IMPLAUSIBLE_RATIO
    return found_N


def assemble_links(measured: Mapping[PeerId, Sequence[MeasuredLink]]) -> Links:
    """Links among the peers of `measured`; pairs that neither end measured are unknown.

    Takes O(N^2) memory. `links_from_measurements` combines the measurements of both ends.
    """
    peers = tuple(measured)
    row_of = {peer_digest(peer): row for row, peer in enumerate(peers)}
    shape = (len(peers), len(peers))
    rtt_ms_NN, rate_NN, age_s_NN = (np.full(shape, np.nan) for _ in range(3))
    for row, links in enumerate(measured.values()):
        for link in links:
            column = row_of.get(link.digest)
            if column is not None and column != row:
                rtt_ms_NN[row, column] = link.rtt_ms
                rate_NN[row, column] = link.rate_bytes_per_s
                age_s_NN[row, column] = link.age_s
    return links_from_measurements(peers, rtt_ms_NN, age_s_NN, rate_NN)
