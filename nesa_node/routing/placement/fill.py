"""Water filling: spans of further nodes go to the blocks with the least speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nesa_node.routing.placement.room import Room
from nesa_node.routing.problem import Floats, Ints

_EMPTY = 1e-9
_SHARPNESS = 3.0


@dataclass(slots=True, eq=False)
class Water:
    """Holders and speed per block of the spans placed so far.

    A node adds its speed divided by the length of its span to each of its blocks.
    """

    holders_B: Ints
    speed_B: Floats

    @classmethod
    def none(cls, num_blocks: int) -> Water:
        return cls(np.zeros(num_blocks, dtype=np.int64), np.zeros(num_blocks))

    def pour(self, start: int, most: int, blocks_per_s: float) -> None:
        self.holders_B[start : start + most] += 1
        self.speed_B[start : start + most] += blocks_per_s / most

    def best_start(
        self, most: int, blocks_per_s: float, replicas: int, least: int, greatest: int
    ) -> int:
        """The best start from `least` to `greatest` for a span of `most` blocks.

        It covers most blocks without a holder, then adds most missing replicas, then most relieves
        slow blocks; ties go to the lowest start. The relief of a block is the decrease of its
        speed^-3: this nearly raises the slowest block first, and sums over windows are cheap.
        """
        level_B = self.speed_B + _EMPTY * blocks_per_s
        ease_B = level_B**-_SHARPNESS - (level_B + blocks_per_s / most) ** -_SHARPNESS
        covered = _windows((self.holders_B == 0).astype(np.float64), most)[least : greatest + 1]
        replicated = _windows((self.holders_B < replicas).astype(np.float64), most)
        eased = _windows(ease_B, most)
        best = np.flatnonzero(covered == covered.max()) + least
        best = best[replicated[best] == replicated[best].max()]
        # Window sums of equal blocks differ in their last bits, which must not break ties.
        return int(best[np.argmax(eased[best] >= eased[best].max() * (1 - 1e-9))])


def fill(room: Room, starts_N: Ints, water: Water, nodes: Sequence[int]) -> None:
    """Place `nodes` in that order: writes their starts to `starts_N` and adds them to `water`."""
    rate_N = room.blocks_per_s_N
    for node in nodes:
        most = int(room.most_N[node])
        if most == 0:
            starts_N[node] = 0
            continue
        last = room.problem.num_blocks - most
        start = water.best_start(most, float(rate_N[node]), room.replicas, 0, last)
        starts_N[node] = start
        water.pour(start, most, float(rate_N[node]))


def _windows(values_B: Floats, width: int) -> Floats:
    """The sums of all windows of `width` blocks."""
    sums = np.concatenate(([0.0], np.cumsum(values_B)))
    return sums[width:] - sums[:-width]
