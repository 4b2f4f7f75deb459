"""Link matrices of a swarm: round trips and transfer rates between every two nodes.

Legend: N nodes. Arrays are read-only. `rtt_ms_NN` is symmetric with a zero diagonal;
`rate_bytes_per_s_NN` is directed: rows send, columns receive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from nesa_node.core.arrays import Floats
from nesa_node.core.ids import PeerId


@dataclass(frozen=True, slots=True)
class ShortestPairs:
    """Pairs of rows of `Links`, and the median round trip of all known pairs."""

    rows: tuple[tuple[int, int], ...]
    num_left_out: int
    median_rtt_ms: float | None


@dataclass(frozen=True, slots=True, eq=False)
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
