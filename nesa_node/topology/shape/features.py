"""Feature vector of a network's shape, for the regression that chooses placement schemas.

Legend: P classes.
"""

from __future__ import annotations

import numpy as np

from nesa_node.topology.shape.diagrams import PersistenceDiagram, make_diagram
from nesa_node.topology.shape.network_shape import NetworkShape

# All lengths are relative to the median edge, so that swarms of any extent compare.
BETTI_SCALES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5)
_STATISTICS = ("count", "sum", "mean", "std", "median", "p90", "max", "entropy")


def compute_features(shape: NetworkShape) -> dict[str, float]:
    """Features of a shape: lifetime statistics and Betti curves of H0 and H1.

    "unit" is the median edge in the filtration's own unit; all other lengths are relative to it.
    "h0.betti@s" is the number of components at `s` times the unit, per node. Counts of H1 are per
    node that it was computed on. Essential classes count in "parts" and Betti curves only.
    """
    unit = shape.median_edge or 1.0
    h0, h1 = _scale_diagram(shape.h0, unit), _scale_diagram(shape.h1, unit)
    nodes, sampled = len(shape.tree), len(shape.landmarks.node_K)
    features = {
        "nodes": float(nodes),
        "unit": float(shape.median_edge),
        "parts": float(h0.num_essential),
    }
    for name, diagram, size in (("h0", h0, nodes), ("h1", h1, sampled)):
        values = zip(_STATISTICS, _lifetime_statistics(diagram, size), strict=True)
        features |= {f"{name}.{statistic}": value for statistic, value in values}
    for name, diagram, size in (("h0", h0, nodes), ("h1", h1, sampled)):
        features |= {f"{name}.betti@{scale}": diagram.betti(scale) / size for scale in BETTI_SCALES}
    return features


def _scale_diagram(diagram: PersistenceDiagram, unit: float) -> PersistenceDiagram:
    return make_diagram(diagram.dimension, diagram.birth_P / unit, diagram.death_P / unit)


def _lifetime_statistics(diagram: PersistenceDiagram, nodes: int) -> list[float]:
    """Lifetime statistics in the order of `_STATISTICS`; zeros if no class dies."""
    life_P = diagram.lifetime_P[np.isfinite(diagram.death_P)]
    if not len(life_P):
        return [0.0] * len(_STATISTICS)
    total = float(life_P.sum())
    share_P = life_P / total
    return [
        len(life_P) / nodes,
        total / nodes,
        float(life_P.mean()),
        float(life_P.std()),
        float(np.median(life_P)),
        float(np.quantile(life_P, 0.9)),
        float(life_P.max()),
        # Persistent entropy: 0 for a single class, 1 if all lifetimes are equal.
        float(-(share_P * np.log(share_P)).sum() / np.log(max(len(life_P), 2))),
    ]
