"""A few nodes that stand for all: max-min landmarks, for which H1 is computed in a large swarm.

Legend: N nodes, K landmarks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nesa_node.topology.homology.filtration import Filtration, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Landmarks:
    """node_K : [K] int64, sorted. No node is farther than `radius` from its nearest landmark.

    In a metric space the bottleneck distance between both diagrams is at most twice `radius`. Round
    trips violate triangles, so for them that is a guide and no bound.
    """

    node_K: Ints
    radius: float


def choose_landmarks(filtration: Filtration, count: int) -> Landmarks:
    """Begin with the node whose farthest one is nearest, then always add the farthest.

    Every part that no edge connects gets one first, if `count` suffices. All nodes, with radius 0,
    where there are no more than `count`.
    """
    if count < 1:
        raise ValueError(f"at least one landmark, not {count}")
    if count >= len(filtration):
        return Landmarks(np.arange(len(filtration)), 0.0)
    weight_NN = filtration.weight_NN
    chosen = [int(weight_NN.max(axis=1).argmin())]
    far_N = weight_NN[chosen[0]].copy()
    while len(chosen) < count:
        chosen.append(int(far_N.argmax()))
        np.minimum(far_N, weight_NN[chosen[-1]], out=far_N)
    return Landmarks(np.sort(np.array(chosen, dtype=np.int64)), float(far_N.max()))
