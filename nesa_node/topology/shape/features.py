"""Feature vector of a network's shape, for the regression that chooses placement schemas.

Legend: F features, P classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nesa_node.core.arrays import Floats
from nesa_node.topology.shape.diagrams import PersistenceDiagram, make_diagram
from nesa_node.topology.shape.network_shape import NetworkShape

# All lengths are relative to the median edge, so that swarms of any extent compare.
BETTI_SCALES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5)
_STATISTICS = ("count", "sum", "mean", "std", "median", "p90", "max", "entropy")


@dataclass(frozen=True, slots=True, eq=False)
class ShapeFeatures:
    """Named features; value_F is [F] float64, finite, and names[i] is the name of value_F[i]."""

    names: tuple[str, ...]
    value_F: Floats

    def as_dict(self) -> dict[str, float]:
        return dict(zip(self.names, self.value_F.tolist(), strict=True))


def feature_names() -> tuple[str, ...]:
    return (
        "nodes",
        "unit",
        "parts",
        *(f"{h}.{name}" for h in ("h0", "h1") for name in _STATISTICS),
        *(f"h0.betti@{scale}" for scale in BETTI_SCALES),
        *(f"h1.betti@{scale}" for scale in BETTI_SCALES),
    )


def compute_features(shape: NetworkShape) -> ShapeFeatures:
    """Features of a shape: lifetime statistics and Betti curves of H0 and H1.

    "unit" is the median edge in the filtration's own unit; all other lengths are relative to it.
    "h0.betti@s" is the number of components at `s` times the unit, per node. Counts of H1 are per
    node that it was computed on. Essential classes count in "parts" and Betti curves only.
    """
    unit = shape.median_edge or 1.0
    h0, h1 = _scale_diagram(shape.h0, unit), _scale_diagram(shape.h1, unit)
    nodes, sampled = len(shape.tree), len(shape.landmarks.node_K)
    values = [
        float(nodes),
        shape.median_edge,
        float(h0.num_essential),
        *_lifetime_statistics(h0, nodes),
        *_lifetime_statistics(h1, sampled),
        *(h0.betti(scale) / nodes for scale in BETTI_SCALES),
        *(h1.betti(scale) / sampled for scale in BETTI_SCALES),
    ]
    return ShapeFeatures(feature_names(), np.array(values, dtype=np.float64))


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
