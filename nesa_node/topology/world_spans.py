"""Spans of the nodes of a synthetic swarm, as nodes choose them without a planner.

Every block has a holder where memory allows it, but replicas are uneven.

Legend: N nodes, B blocks, S possible starts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nesa_node.core.span import Span

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_SHARE = 0.5
"""Maximum fraction of the model per node, so that chains have several hops; more with few nodes."""


def choose_spans(
    max_blocks_N: Ints,
    num_blocks: int,
    rng: np.random.Generator,
    holders_B: Ints | None = None,
) -> list[Span]:
    """Choose a span for every node, no longer than `max_blocks_N` and never empty.

    `holders_B` counts the present holders of each block, zero if None. The longest spans are chosen
    first: the window with the most unheld blocks, then with the most blocks of one holder. Once all
    blocks have two holders, windows are random.
    """
    count = len(max_blocks_N)
    share = MAX_SHARE if holders_B is not None else max(MAX_SHARE, 2.5 / max(1, count))
    cap = max(1, round(num_blocks * min(1.0, share)))
    length_N = np.clip(max_blocks_N, 1, cap)
    # Nodes offer 70 to 100 % of their memory.
    length_N = np.maximum(1, np.ceil(length_N * rng.uniform(0.7, 1.0, count))).astype(np.int64)
    holders_B = np.zeros(num_blocks, dtype=np.int64) if holders_B is None else holders_B.copy()
    spans = [Span(0, 0)] * count
    for node in np.argsort(-length_N, kind="stable"):
        start = _choose_start(holders_B, int(length_N[node]), rng)
        end = start + int(length_N[node])
        holders_B[start:end] += 1
        spans[int(node)] = Span(start, end)
    return spans


def _choose_start(holders_B: Ints, length: int, rng: np.random.Generator) -> int:
    starts = len(holders_B) - length + 1
    if holders_B.min() >= 2:
        return int(rng.integers(starts))
    need_B = np.where(holders_B == 0, len(holders_B) + 1.0, np.where(holders_B == 1, 1.0, 0.0))
    sums = np.concatenate(([0.0], np.cumsum(need_B)))
    need_S = sums[length:] - sums[:-length]
    best = np.flatnonzero(need_S == need_S.max())
    # A window that leaves a narrow gap wastes a later node: prefer windows at the edge of held
    # blocks, which are the first and the last of the best.
    return int(best[0] if rng.random() < 0.5 else best[-1])
