"""A planner just good enough to say whether a move would pay: one stage per node, chains by region.

It stands in for the real planners, so that triggers can be judged without them.

Legend: N nodes, C clients, S stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.traces import TraceStep

Floats = NDArray[np.float64]
STAGES = 8
COMPUTE_S = 0.005
# What a client without a chain costs.
UNSERVED_S = 5.0


class Placement:
    """Which stage each node holds. Nodes that come choose for themselves; a move is `adopt`."""

    def __init__(self, step: TraceStep, rng: np.random.Generator, *, proposals: int) -> None:
        self._rng = rng
        self._stage: dict[str, int] = {}
        self.follow(step)
        self.adopt(step, self.improved(step, step.true_s_NN, proposals))

    def follow(self, step: TraceStep) -> None:
        """Forget who left. Who came takes what its region has least of, then what all have."""
        present = set(step.peers)
        self._stage = {peer: stage for peer, stage in self._stage.items() if peer in present}
        regions = dict(zip(step.peers, step.region_N.tolist(), strict=True))
        for peer in step.peers:
            if peer in self._stage:
                continue
            near = [
                stage for other, stage in self._stage.items() if regions[other] == regions[peer]
            ]
            held = list(self._stage.values())
            self._stage[peer] = min(range(STAGES), key=lambda s: (near.count(s), held.count(s), s))

    def stages(self, step: TraceStep) -> list[int]:
        return [self._stage[peer] for peer in step.peers]

    def held_by(self, step: TraceStep, candidate: Mapping[str, int]) -> list[int]:
        """The stages under another plan, in which nodes that it does not know hold what they do."""
        return [candidate.get(peer, self._stage[peer]) for peer in step.peers]

    def adopt(self, step: TraceStep, stages: Sequence[int]) -> None:
        self._stage = dict(zip(step.peers, stages, strict=True))

    def improved(self, step: TraceStep, seconds_NN: Floats, proposals: int) -> list[int]:
        """The best of a climb from the present plan, one node's stage at a time."""
        stages = self.stages(step)
        cost = plan_cost(stages, step, seconds_NN)
        for _ in range(proposals):
            node, stage = int(self._rng.integers(len(stages))), int(self._rng.integers(STAGES))
            before, stages[node] = stages[node], stage
            changed = plan_cost(stages, step, seconds_NN)
            if changed < cost:
                cost = changed
            else:
                stages[node] = before
        return stages


def plan_cost(stages: Sequence[int], step: TraceStep, seconds_NN: Floats) -> float:
    """Mean seconds of a step for clients at the fixed nodes, each by its best chain."""
    stage_N = np.asarray(stages)
    clients = np.flatnonzero(step.fixed_N)
    holders = [np.flatnonzero(stage_N == stage) for stage in range(STAGES)]
    if not all(len(of) for of in holders):
        return UNSERVED_S
    seconds_CN = seconds_NN[np.ix_(clients, holders[0])]
    for before, after in itertools.pairwise(holders):
        hop = seconds_NN[np.ix_(before, after)]
        seconds_CN = (seconds_CN[:, :, None] + hop).min(axis=1)
    total_C = (seconds_CN + seconds_NN[np.ix_(holders[-1], clients)].T).min(axis=1) / 2
    return float(np.minimum(total_C + STAGES * COMPUTE_S, UNSERVED_S).mean())


class Smoothed:
    """The median of the last three measurements of each pair, which the planner goes by."""

    def __init__(self) -> None:
        self._steps: list[TraceStep] = []

    def add(self, step: TraceStep) -> Floats:
        """[N, N] float64 for the nodes of `step`."""
        self._steps = [*self._steps[-2:], step]
        layers = []
        for old in self._steps:
            place = {peer: index for index, peer in enumerate(old.peers)}
            index_N = np.array([place.get(peer, -1) for peer in step.peers])
            layer_NN = old.measured_s_NN[np.ix_(index_N, index_N)].copy()
            layer_NN[index_N < 0] = np.nan
            layer_NN[:, index_N < 0] = np.nan
            layers.append(layer_NN)
        seconds_NN: Floats = np.nanmedian(layers, axis=0)
        return seconds_NN
