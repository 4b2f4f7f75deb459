"""Feature vector of a network's shape, for the regression that chooses placement schemas.

Legend: F features, P classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nesa_node.topology.homology.diagrams import Diagram, make_diagram
from nesa_node.topology.homology.filtration import Floats
from nesa_node.topology.homology.images import lifetime_image, persistence_image
from nesa_node.topology.homology.shape import Shape

# All lengths are relative to the median edge, so that swarms of any extent compare.
SCALES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5)
_STATISTICS = ("count", "sum", "mean", "std", "median", "p90", "max", "entropy")
_EXTENT = 1.5
_H0_PIXELS = 12
_H1_PIXELS = (6, 6)
_SPREAD = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """Named features; value_F is [F] float64, finite, and names[i] is the name of value_F[i]."""

    names: tuple[str, ...]
    value_F: Floats

    def as_dict(self) -> dict[str, float]:
        return dict(zip(self.names, self.value_F.tolist(), strict=True))


def feature_names() -> tuple[str, ...]:
    h0_image = [f"h0.image.{y}" for y in range(_H0_PIXELS)]
    h1_image = [f"h1.image.{x}.{y}" for x, y in np.ndindex(_H1_PIXELS)]
    return (
        "nodes",
        "unit",
        "parts",
        *(f"{h}.{name}" for h in ("h0", "h1") for name in _STATISTICS),
        *(f"h0.betti@{scale}" for scale in SCALES),
        *(f"h1.betti@{scale}" for scale in SCALES),
        *h0_image,
        *h1_image,
    )


def features_of(shape: Shape) -> Features:
    """Features of a shape: lifetime statistics, Betti curves, persistence images of H0 and H1.

    "unit" is the median edge in the filtration's own unit; all other lengths are relative to it.
    "h0.betti@s" is the number of components at `s` times the unit, per node. Counts of H1 are per
    node that it was computed on. Essential classes count in "parts" and Betti curves only.
    """
    unit = shape.unit or 1.0
    h0, h1 = _relative(shape.h0, unit), _relative(shape.h1, unit)
    nodes, sampled = len(shape.tree), len(shape.landmarks.node_K)
    h0_image = lifetime_image(h0, extent=_EXTENT, pixels=_H0_PIXELS, spread=_SPREAD)
    h1_image = persistence_image(
        h1, extent=(_EXTENT, _EXTENT / 3), pixels=_H1_PIXELS, spread=_SPREAD / 3
    )
    values = [
        float(nodes),
        shape.unit,
        float(h0.essential),
        *_statistics(h0, nodes),
        *_statistics(h1, sampled),
        *(h0.betti(scale) / nodes for scale in SCALES),
        *(h1.betti(scale) / sampled for scale in SCALES),
        *(h0_image / nodes).tolist(),
        *(h1_image / sampled).ravel().tolist(),
    ]
    return Features(feature_names(), np.array(values, dtype=np.float64))


def _relative(diagram: Diagram, unit: float) -> Diagram:
    return make_diagram(diagram.dimension, diagram.birth_P / unit, diagram.death_P / unit)


def _statistics(diagram: Diagram, nodes: int) -> list[float]:
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
