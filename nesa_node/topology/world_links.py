"""Random links of a synthetic swarm.

A round trip is that between the regions' exchanges, times a random factor, plus both access delays.
A rate is that of the slower access link, less a random loss.

Legend: A and B machines each, R regions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MBIT = 125_000.0
"""Bytes/s of one Mbit/s."""

DETOURS = 0.02
"""Fraction of pairs that are connected by a detour."""

_ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True, eq=False)
class Access:
    """Access links of A machines; `rtt_ms_A` is the round trip to the region's exchange."""

    residential_A: Bools
    rtt_ms_A: Floats
    up_bytes_per_s_A: Floats
    down_bytes_per_s_A: Floats

    def __len__(self) -> int:
        return len(self.rtt_ms_A)

    def at(self, rows: Ints) -> Self:
        """Access links of the machines with these indices, in this order."""
        return type(self)(
            self.residential_A[rows],
            self.rtt_ms_A[rows],
            self.up_bytes_per_s_A[rows],
            self.down_bytes_per_s_A[rows],
        )


def draw_access(residential_A: Bools, rng: np.random.Generator) -> Access:
    """Draw access links. Medians: 9 ms, 40 Mbit/s up, 250 down at home; else 0.6 ms, 2 Gbit/s."""
    count = len(residential_A)
    spread_A = np.where(residential_A, 0.6, 0.5)
    down_A = np.where(residential_A, 250.0, 2000.0) * rng.lognormal(0.0, spread_A)
    up_A = np.where(residential_A, 40.0, 2000.0) * rng.lognormal(0.0, spread_A)
    return Access(
        residential_A,
        np.where(residential_A, 9.0, 0.6) * rng.lognormal(0.0, 0.5, count),
        np.minimum(up_A, np.where(residential_A, down_A, np.inf)) * MBIT,
        down_A * MBIT,
    )


def round_trips(
    rtt_ms_RR: Floats,
    region_A: Ints,
    access_A: Access,
    region_B: Ints,
    access_B: Access,
    rng: np.random.Generator,
) -> Floats:
    """Draw round trips in ms, [A, B]. Noise differs by direction: see `links.mirror`."""
    rtt_ms_AB = np.empty((len(region_A), len(region_B)))
    for start in range(0, len(region_A), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        part_AB = rtt_ms_RR[np.ix_(region_A[rows], region_B)]
        part_AB *= rng.lognormal(0.0, 0.04, part_AB.shape)
        detour_AB = rng.random(part_AB.shape) < DETOURS
        part_AB[detour_AB] *= 1.0 + rng.uniform(0.3, 1.0, int(detour_AB.sum()))
        part_AB += access_A.rtt_ms_A[rows, None]
        part_AB += access_B.rtt_ms_A[None, :]
        rtt_ms_AB[rows] = part_AB
    return rtt_ms_AB


def rates(access_A: Access, access_B: Access, rng: np.random.Generator) -> Floats:
    """Draw rates in bytes/s, [A, B]: what both access links carry, less up to 30 %."""
    rate_AB: Floats = np.minimum(
        access_A.up_bytes_per_s_A[:, None], access_B.down_bytes_per_s_A[None, :]
    )
    for start in range(0, len(access_A), _ROWS_AT_ONCE):
        part_AB = rate_AB[start : start + _ROWS_AT_ONCE]
        part_AB *= rng.uniform(0.7, 1.0, part_AB.shape)
    return rate_AB
