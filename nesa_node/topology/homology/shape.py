"""Shape of a network: merge tree, H0, H1, and the median edge as its unit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nesa_node.topology.homology.backend import TooManyTrianglesError
from nesa_node.topology.homology.diagrams import Diagram, betti_numbers
from nesa_node.topology.homology.filtration import Filtration
from nesa_node.topology.homology.landmarks import Landmarks, choose_landmarks
from nesa_node.topology.homology.loops import Loop, longest_loops, loop_diagram
from nesa_node.topology.homology.merge_tree import MergeTree, merge_tree

# gudhi needs 5 ms for 200 nodes, 0.3 s for 1,000 and 11 s for 5,000.
EXACT_UP_TO = 500
LANDMARKS = 200


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """Shape of a network. `unit` is the median edge; `h1` and `loops` are those of `landmarks`.

    Nodes in `loops` are indices into the whole filtration. `loop_nodes` is the number of nodes that
    cycles were computed on: fewer than `h1` uses if there are many nodes or triangles.
    """

    tree: MergeTree
    h0: Diagram
    h1: Diagram
    loops: tuple[Loop, ...]
    loop_nodes: int
    landmarks: Landmarks
    unit: float

    def betti(self, scale: float) -> tuple[int, int]:
        b0, b1 = betti_numbers((self.h0, self.h1), scale)
        return b0, b1


def shape_of(
    filtration: Filtration,
    *,
    threshold: float = np.inf,
    exact_up_to: int = EXACT_UP_TO,
    landmarks: int = LANDMARKS,
    most_loops: int = 5,
) -> Shape:
    """Compute the shape: H0 of all nodes; H1 up to `threshold`, of all nodes or of landmarks.

    Beyond `exact_up_to` nodes H1 is that of `landmarks` nodes.

    Raises `ValueError` for an empty network.
    """
    if not len(filtration):
        raise ValueError("a network without nodes has no shape")
    exact = len(filtration) <= exact_up_to
    chosen = choose_landmarks(filtration, len(filtration) if exact else landmarks)
    # Cycles cost more than diagrams: they are computed on landmarks even if H1 is exact.
    part = filtration if exact else filtration.restricted(chosen.node_K)
    h1 = loop_diagram(part, threshold=threshold)
    few = chosen if len(chosen.node_K) <= landmarks else choose_landmarks(filtration, landmarks)
    known = h1 if few is chosen else None
    while True:
        sparse = filtration.restricted(few.node_K)
        try:
            found = longest_loops(sparse, most_loops, threshold=threshold, diagram=known)
            break
        except TooManyTrianglesError:
            few, known = choose_landmarks(filtration, len(few.node_K) // 2), None
    node = few.node_K.tolist()
    loops = tuple(
        Loop(loop.birth, loop.death, tuple((node[a], node[b]) for a, b in loop.edges))
        for loop in found
    )
    tree, unit = merge_tree(filtration), filtration.median_weight()
    return Shape(tree, tree.diagram(), h1, loops, len(node), chosen, unit)
