"""Link matrices of a swarm: round trips and transfer rates between every two nodes.

Legend: N nodes. Arrays are read-only. `rtt_ms_NN` is symmetric with a zero diagonal;
`rate_bytes_per_s_NN` is directed: rows send, columns receive.

Packed link measurements of one node, 12 bytes each, as its DHT record carries them.

A round trip is a float16 in ms (exact to 0.05 %, up to 65 s), a rate a float16 in MB/s, an age a
float16 in minutes. A peer is the first 6 bytes of the SHA-256 of its id. An attacker that grinds an
id which collides with a given one inherits that node's measurements, until a node pings both and
reports neither. Two colliding ids of its own are found after about 2^24 tries.

Row i, column j of a directed array is what i measured to j: the median of its last pings. Both ends
measure the same round trip; they differ by the queueing delay inside the busier end, which only
adds. So the smaller of the two medians counts. (On the Seattle testbed it is 16 % off the next
minutes' round trip, in the median; the mean of both is 37 % off, the larger 53 %.) Triangle
violations are kept: packets do take detours.

A node can claim round trips that are too small, to attract traffic, but cannot make its peers
measure less than the network takes. If its claims are, in the median, below half of what its peers
measured, they are ignored and the peers' measurements count. (That hits 0.4 of Seattle's 99 honest
nodes; the error grows to 16.1 %.)
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nesa_node.core.arrays import Bools, Floats
from nesa_node.core.ids import PeerId


@dataclass(frozen=True, slots=True)
class ShortestPairs:
    """Pairs of rows of `Links`, and the median round trip of all known pairs."""

    rows: tuple[tuple[int, int], ...]
    num_left_out: int
    median_rtt_ms: float | None


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Links:
    """Links among `peers`, in their order; arrays are [N, N] float64.

    `rtt_ms_NN`: NaN if unknown. `rate_bytes_per_s_NN`: NaN without a measured transfer, inf within
    one machine. `age_s_NN`: seconds since the round trip was measured, NaN for estimates.
    `confidence_NN`: 1 if both ends have just measured, towards 0 for an estimate.
    """

    peers: tuple[PeerId, ...]
    rtt_ms_NN: Floats
    rate_bytes_per_s_NN: Floats
    age_s_NN: Floats
    confidence_NN: Floats
    _rows: dict[PeerId, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        size = len(self.peers)
        for name in ("rtt_ms_NN", "rate_bytes_per_s_NN", "age_s_NN", "confidence_NN"):
            array = np.asarray(getattr(self, name), dtype=np.float64)
            if array.shape != (size, size):
                raise ValueError(f"{name} must have shape {(size, size)}, got {array.shape}")
            array = array.view()
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        object.__setattr__(self, "_rows", {peer: row for row, peer in enumerate(self.peers)})
        if len(self._rows) != size:
            raise ValueError("a peer is listed twice")

    @classmethod
    def unknown(cls, peers: Sequence[PeerId]) -> Self:
        """Links among `peers` without any measurement."""
        size = len(peers)
        nothing_NN = np.full((size, size), np.nan)
        rtt_ms_NN = nothing_NN.copy()
        np.fill_diagonal(rtt_ms_NN, 0.0)
        return cls(tuple(peers), rtt_ms_NN, nothing_NN, nothing_NN, np.zeros((size, size)))

    def select(self, peers: Sequence[PeerId]) -> Links:
        """Links of `peers`, in that order; unknown for peers that are not among `self.peers`."""
        if tuple(peers) == self.peers:
            return self
        rows = np.array([self._rows.get(peer, -1) for peer in peers], dtype=np.int64)
        known = np.ix_(rows >= 0, rows >= 0)
        picked = np.ix_(rows[rows >= 0], rows[rows >= 0])
        blank = Links.unknown(peers)
        arrays = []
        for name in ("rtt_ms_NN", "rate_bytes_per_s_NN", "age_s_NN", "confidence_NN"):
            array = np.array(getattr(blank, name))
            array[known] = getattr(self, name)[picked]
            arrays.append(array)
        return Links(tuple(peers), *arrays)

    def select_arrays(self, peers: Sequence[PeerId]) -> tuple[Floats, Floats]:
        """Round trips and rates among `peers`, in that order; cheaper than `select`."""
        if tuple(peers) == self.peers:
            return self.rtt_ms_NN, self.rate_bytes_per_s_NN
        rows = np.array([self._rows.get(peer, -1) for peer in peers], dtype=np.int64)
        picked = np.ix_(rows, rows)
        rtt_ms_NN, rate_NN = self.rtt_ms_NN[picked], self.rate_bytes_per_s_NN[picked]
        for array in (rtt_ms_NN, rate_NN):
            array[rows < 0, :] = np.nan
            array[:, rows < 0] = np.nan
        return rtt_ms_NN, rate_NN

    def rtt_ms(self, first: PeerId, second: PeerId) -> float:
        """Round trip between two peers in ms; NaN if either is not among `self.peers`."""
        if first not in self._rows or second not in self._rows:
            return float("nan")
        return float(self.rtt_ms_NN[self._rows[first], self._rows[second]])

    def shortest_pairs(self, max_pairs: int) -> ShortestPairs:
        """The pairs with a known round trip, the shortest first."""
        first, second = np.triu_indices(len(self.peers), 1)
        rtt_ms = self.rtt_ms_NN[first, second]
        known = np.flatnonzero(np.isfinite(rtt_ms))
        chosen = known[np.argsort(rtt_ms[known], kind="stable")][:max_pairs]
        return ShortestPairs(
            rows=tuple(zip(first[chosen].tolist(), second[chosen].tolist(), strict=True)),
            num_left_out=len(known) - len(chosen),
            median_rtt_ms=float(np.median(rtt_ms[known])) if len(known) else None,
        )


def make_symmetric(rtt_ms_NN: Floats) -> None:
    """Copy the upper triangle to the lower one and zero the diagonal, in place."""
    for row in range(1, len(rtt_ms_NN)):
        rtt_ms_NN[row, :row] = rtt_ms_NN[:row, row]
    np.fill_diagonal(rtt_ms_NN, 0.0)


MAX_LINKS_PER_RECORD = 16
"""Maximum number of links in one record."""
DIGEST_BYTES = 6
_LINK_FORMAT = struct.Struct(f"<{DIGEST_BYTES}seee")
MAX_PACKED_BYTES = MAX_LINKS_PER_RECORD * _LINK_FORMAT.size
_MAX_PACKED_VALUE = 60_000.0


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """Measured link to the peer with this id digest; `rate_bytes_per_s` is NaN if unknown."""

    digest: bytes
    rtt_ms: float
    rate_bytes_per_s: float
    age_s: float


def peer_digest(peer: PeerId) -> bytes:
    return hashlib.sha256(peer.encode()).digest()[:DIGEST_BYTES]


def pack_links(links: Sequence[MeasuredLink]) -> bytes:
    """Encode links for a record. Raises `ValueError` for more than `MAX_LINKS_PER_RECORD`."""
    if len(links) > MAX_LINKS_PER_RECORD:
        raise ValueError(f"{len(links)} links do not fit a record, {MAX_LINKS_PER_RECORD} do")
    return b"".join(
        _LINK_FORMAT.pack(
            link.digest,
            min(link.rtt_ms, _MAX_PACKED_VALUE),
            min(link.rate_bytes_per_s / 1e6, _MAX_PACKED_VALUE),
            min(link.age_s / 60, _MAX_PACKED_VALUE),
        )
        for link in links
    )


def unpack_links(packed: bytes) -> tuple[MeasuredLink, ...]:
    """Decode links of a record. Raises `ValueError` for bytes that `pack_links` cannot make."""
    if len(packed) > MAX_PACKED_BYTES or len(packed) % _LINK_FORMAT.size:
        raise ValueError(f"{len(packed)} bytes are no list of measured links")
    links = []
    for digest, rtt_ms, rate_mb_per_s, age_min in _LINK_FORMAT.iter_unpack(packed):
        link = MeasuredLink(digest, rtt_ms, rate_mb_per_s * 1e6, age_min * 60)
        rate_is_fine = math.isnan(rate_mb_per_s) or 0 <= rate_mb_per_s < math.inf
        if not (0 <= rtt_ms < math.inf and rate_is_fine and 0 <= age_min < math.inf):
            raise ValueError(f"not a measured link: {link}")
        links.append(link)
    if len({link.digest for link in links}) < len(links):
        raise ValueError("a peer occurs twice among measured links")
    return tuple(links)


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
