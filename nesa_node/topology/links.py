"""How far every two nodes are apart, and how fast bytes go between them.

N is the number of nodes. Arrays are read-only. `rtt_ms_NN` is symmetric with a zero diagonal (a
round trip has no direction); `rate_bytes_per_s_NN` has one: rows send, columns receive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nesa_node.core.ids import PeerId

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """What is known of the links among `peers`, in their order.

    `rtt_ms_NN`: milliseconds, NaN where nobody knows. `rate_bytes_per_s_NN`: NaN where nobody has
    watched a transfer, inf on one machine. `age_s_NN`: seconds since the round trip was measured,
    NaN where it never was. `confidence_NN`: 1 for what both ends have just measured, towards 0 for
    what is only an estimate.
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
        """Links of which nothing is known."""
        size = len(peers)
        nothing_NN = np.full((size, size), np.nan)
        rtt_ms_NN = nothing_NN.copy()
        np.fill_diagonal(rtt_ms_NN, 0.0)
        return cls(tuple(peers), rtt_ms_NN, nothing_NN, nothing_NN, np.zeros((size, size)))

    def of(self, peers: Sequence[PeerId]) -> Links:
        """The same for `peers` in that order. Peers that are not in here are unknown."""
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

    def between(self, peers: Sequence[PeerId]) -> tuple[Floats, Floats]:
        """Round trips and rates among `peers` alone, in that order; cheaper than `of`."""
        if tuple(peers) == self.peers:
            return self.rtt_ms_NN, self.rate_bytes_per_s_NN
        rows = np.array([self._rows.get(peer, -1) for peer in peers], dtype=np.int64)
        picked = np.ix_(rows, rows)
        rtt_ms_NN, rate_NN = self.rtt_ms_NN[picked], self.rate_bytes_per_s_NN[picked]
        for array in (rtt_ms_NN, rate_NN):
            array[rows < 0, :] = np.nan
            array[:, rows < 0] = np.nan
        return rtt_ms_NN, rate_NN

    def rtt_ms(self, one: PeerId, other: PeerId) -> float:
        """NaN if either is not in here."""
        if one not in self._rows or other not in self._rows:
            return float("nan")
        return float(self.rtt_ms_NN[self._rows[one], self._rows[other]])


def mirror(rtt_ms_NN: Floats) -> None:
    """Make it symmetric with a zero diagonal, in place: what is above the diagonal counts."""
    for row in range(1, len(rtt_ms_NN)):
        rtt_ms_NN[row, :row] = rtt_ms_NN[:row, row]
    np.fill_diagonal(rtt_ms_NN, 0.0)
