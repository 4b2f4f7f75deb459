"""Throughput of an assignment as a maximum flow, and an upper bound for all assignments.

N nodes, B blocks. Node i does `rate_N[i]` blocks per second, divided freely among the blocks of its
span; every block must be done equally often. Queueing and transfers are ignored: they add latency
but use no compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nesa_node.routing.placement.room import Layout
from nesa_node.routing.problem import Floats, Ints

_TOLERANCE = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """Throughput of the swarm in steps per second, and the blocks that limit it."""

    steps_per_s: float
    narrow_B: NDArray[np.bool_]


def measure_flow(layout: Layout, rate_N: Floats, num_blocks: int) -> Flow:
    """The exact maximum flow, equal to the linear program over all divisions of nodes' time.

    Node i does `rate_N[i]` blocks per second, divided freely among the blocks of its span; every
    block must be done equally often. Queueing and transfers are ignored: they use no compute.

    By duality it is the minimum, over sets U of blocks, of (speed of the nodes that hold any of
    U) / |U|. The complement of U is a set of gaps, and a node holds none of U if its span lies
    inside one gap. So for a guess g a dynamic program over the ends of gaps finds the most violated
    set in O(B^2), and the ratio of that set is the next guess (Dinkelbach's method).
    """
    inside_BB = _speed_inside(layout, rate_N, num_blocks)
    total = float(inside_BB[0, num_blocks])
    narrow_B = np.ones(num_blocks, dtype=np.bool_)
    guess = total / num_blocks
    while guess > 0:
        slack, candidate_B = _most_violated(inside_BB, guess, num_blocks)
        if slack <= total - guess * num_blocks + _TOLERANCE * total or not candidate_B.any():
            break
        gaps_speed = slack + guess * float((~candidate_B).sum())
        better = max(total - gaps_speed, 0.0) / float(candidate_B.sum())
        if better >= guess * (1 - _TOLERANCE):
            break
        guess, narrow_B = better, candidate_B
        if guess < _TOLERANCE * total:
            guess = 0.0
    return Flow(guess, narrow_B)


def most_flow(most_N: Ints, rate_N: Floats, num_blocks: int) -> float:
    """Upper bound in steps per second for all placements.

    A node does at most `rate_N` blocks per second, and each of its `most_N` blocks no more often
    than the swarm does. So the bound is the greatest x with sum of min(rate, most * x) >= B * x.
    """
    usable = (most_N > 0) & (rate_N > 0)
    most_N, rate_N = most_N[usable].astype(np.float64), rate_N[usable]
    if most_N.sum() < num_blocks:
        return 0.0
    limit = float(rate_N.sum()) / num_blocks
    while True:
        small = rate_N <= most_N * limit
        spread = num_blocks - float(most_N[~small].sum())
        if spread <= 0:
            return limit
        better = float(rate_N[small].sum()) / spread
        if better >= limit * (1 - _TOLERANCE):
            return limit
        limit = better


def _speed_inside(layout: Layout, rate_N: Floats, num_blocks: int) -> Floats:
    """The total speed [s, e] of the nodes with a span within `s:e`."""
    size = num_blocks + 1
    by_span = np.zeros((size, size))
    holds = layout.ends_N > layout.starts_N
    np.add.at(by_span, (layout.starts_N[holds], layout.ends_N[holds]), rate_N[holds])
    later_starts = np.cumsum(by_span[::-1], axis=0)[::-1]
    return np.cumsum(later_starts, axis=1)


def _most_violated(
    inside_BB: Floats, guess: float, num_blocks: int
) -> tuple[float, NDArray[np.bool_]]:
    """The largest sum over gaps of (speed inside - guess * length), and the blocks outside them."""
    best = np.zeros(num_blocks + 1)
    gap_start = np.full(num_blocks + 1, -1)
    lengths = np.arange(num_blocks + 1)
    for end in range(1, num_blocks + 1):
        gains = best[:end] + inside_BB[:end, end] - guess * (end - lengths[:end])
        start = int(np.argmax(gains))
        best[end], gap_start[end] = best[end - 1], -1
        if gains[start] > best[end]:
            best[end], gap_start[end] = gains[start], start
    kept = np.ones(num_blocks, dtype=np.bool_)
    end = num_blocks
    while end > 0:
        start = int(gap_start[end])
        if start < 0:
            end -= 1
        else:
            kept[start:end] = False
            end = start
    return float(best[num_blocks]), kept
