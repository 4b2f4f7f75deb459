"""Max-min landmarks: the sample of nodes on which H1 is computed in a large swarm.

Legend: N nodes, K landmarks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nesa_node.topology.homology.filtration import Filtration, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Landmarks:
    """Landmark nodes, [K] int64, sorted. Every node is within `radius` of a landmark.

    In a metric space the bottleneck distance of both diagrams is at most 2 `radius`. Round trips
    violate the triangle inequality, so for them that is no bound.
    """

    node_K: Ints
    radius: float


def choose_landmarks(filtration: Filtration, count: int) -> Landmarks:
    """Choose landmarks greedily: start at the graph's centre, then add the farthest node.

    Every connected component gets one first, if `count` suffices. Returns all nodes, with radius 0,
    if there are at most `count`.
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
