"""A recorded table of round trips over time, as a trace in which nodes come and go.

Legend: T slices, N nodes of the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.traces import TraceEvent, TraceStep

Floats = NDArray[np.float64]
_CLIENTS = 6


def load_round_trips(path: Path) -> Floats:
    """[T, N, N] float64 seconds, symmetric, inf where neither direction answered.

    The file is an .npz with one array of that shape, in which 0 means "no answer". Of two
    directions the shorter counts, since what disturbs a ping makes it longer.
    """
    with np.load(path) as archive:
        raw_TNN = np.asarray(archive[archive.files[0]], dtype=np.float64)
    if raw_TNN.ndim != 3 or raw_TNN.shape[1] != raw_TNN.shape[2]:
        raise ValueError(f"{path}: round trips must be [slices, nodes, nodes], not {raw_TNN.shape}")
    raw_TNN[~(raw_TNN > 0)] = np.inf
    seconds_TNN = np.minimum(raw_TNN, raw_TNN.transpose(0, 2, 1))
    diagonal = np.arange(raw_TNN.shape[1])
    seconds_TNN[:, diagonal, diagonal] = 0.0
    return seconds_TNN


def replay(
    seconds_TNN: Floats,
    snapshots: int,
    rng: np.random.Generator,
    *,
    churn: float,
    event: TraceEvent | None = None,
) -> Iterator[TraceStep]:
    """Yield `snapshots` steps, from a slice chosen at random on.

    The "region" of an event is a sixth of the nodes: those nearest to one chosen at random. All but
    six, where clients sit, leave with the chance `churn` and come back after five snapshots on
    average. "True" are the medians over all slices, with what the event adds.
    """
    slices, count = seconds_TNN.shape[:2]
    usual_NN = np.median(seconds_TNN, axis=0)
    centre = int(rng.integers(count))
    region_N = np.ones(count, dtype=np.int64)
    region_N[np.argsort(usual_NN[centre])[: count // 6]] = 0
    fixed_N = np.zeros(count, dtype=bool)
    fixed_N[rng.choice(count, _CLIENTS, replace=False)] = True
    present_N = np.ones(count, dtype=bool)
    first = int(rng.integers(slices - snapshots + 1))
    for at in range(snapshots):
        leaves_N = present_N & (rng.random(count) < churn)
        returns_N = ~present_N & (rng.random(count) < 0.2)
        present_N = ((present_N & ~leaves_N) | returns_N) | fixed_N
        there_N = present_N.copy()
        added_NN = np.zeros((count, count))
        if event and at >= event.at:
            across_NN = region_N[:, None] != region_N
            if event.kind == "regional loss":
                there_N &= region_N != 0
            added_NN[across_NN] = np.inf if event.kind == "partition" else event.added_s
        nodes = np.flatnonzero(there_N)
        pairs = np.ix_(nodes, nodes)
        yield TraceStep(
            at,
            tuple(f"n{node}" for node in nodes.tolist()),
            region_N[nodes],
            fixed_N[nodes],
            (seconds_TNN[first + at] + added_NN)[pairs],
            (usual_NN + added_NN)[pairs],
            np.ones(len(nodes)),
            np.zeros(len(nodes)),
        )
