"""Feature vector of a network's shape, for the regression that chooses placement schemas.

Persistence images are diagrams as arrays of fixed size (Adams et al., JMLR 18, 2017).

Legend: F features, P classes, X pixels along birth, Y pixels along lifetime.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nesa_node.core.arrays import Floats
from nesa_node.topology.shape.diagrams import PersistenceDiagram, make_diagram
from nesa_node.topology.shape.network_shape import NetworkShape


def persistence_image(
    diagram: PersistenceDiagram,
    *,
    extent: tuple[float, float],
    pixels: tuple[int, int],
    spread: float,
) -> Floats:
    """Image [X, Y] float64: Gaussians at (birth, lifetime), weighted by lifetime, per pixel.

    extent : the largest birth and the largest lifetime shown; both begin at 0.
    spread : standard deviation of the Gaussians, in the diagram's unit.

    Essential classes are left out. Linear weights make the image continuous in the diagram.
    """
    from scipy.special import ndtr

    finite = np.isfinite(diagram.death_P)
    birth_P, lifetime_P = diagram.birth_P[finite], diagram.lifetime_P[finite]
    edge_X = np.linspace(0.0, extent[0], pixels[0] + 1)
    edge_Y = np.linspace(0.0, extent[1], pixels[1] + 1)
    mass_PX = np.diff(ndtr((edge_X - birth_P[:, None]) / spread), axis=1)
    mass_PY = np.diff(ndtr((edge_Y - lifetime_P[:, None]) / spread), axis=1)
    image_XY: Floats = np.einsum("p,px,py->xy", lifetime_P, mass_PX, mass_PY)
    return image_XY


def lifetime_image(
    diagram: PersistenceDiagram, *, extent: float, pixels: int, spread: float
) -> Floats:
    """Image [Y] float64 of lifetimes alone, for H0 of nodes that are all born at once."""
    from scipy.special import ndtr

    lifetime_P = diagram.lifetime_P[np.isfinite(diagram.death_P)]
    edge_Y = np.linspace(0.0, extent, pixels + 1)
    mass_PY = np.diff(ndtr((edge_Y - lifetime_P[:, None]) / spread), axis=1)
    image_Y: Floats = lifetime_P @ mass_PY
    return image_Y


# All lengths are relative to the median edge, so that swarms of any extent compare.
BETTI_SCALES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5)
_STATISTICS = ("count", "sum", "mean", "std", "median", "p90", "max", "entropy")
_IMAGE_EXTENT = 1.5
_H0_PIXELS = 12
_H1_PIXELS = (6, 6)
_IMAGE_SPREAD = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class ShapeFeatures:
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
        *(f"h0.betti@{scale}" for scale in BETTI_SCALES),
        *(f"h1.betti@{scale}" for scale in BETTI_SCALES),
        *h0_image,
        *h1_image,
    )


def compute_features(shape: NetworkShape) -> ShapeFeatures:
    """Features of a shape: lifetime statistics, Betti curves, persistence images of H0 and H1.

    "unit" is the median edge in the filtration's own unit; all other lengths are relative to it.
    "h0.betti@s" is the number of components at `s` times the unit, per node. Counts of H1 are per
    node that it was computed on. Essential classes count in "parts" and Betti curves only.
    """
    unit = shape.median_edge or 1.0
    h0, h1 = _scale_diagram(shape.h0, unit), _scale_diagram(shape.h1, unit)
    nodes, sampled = len(shape.tree), len(shape.landmarks.node_K)
    h0_image = lifetime_image(h0, extent=_IMAGE_EXTENT, pixels=_H0_PIXELS, spread=_IMAGE_SPREAD)
    h1_image = persistence_image(
        h1, extent=(_IMAGE_EXTENT, _IMAGE_EXTENT / 3), pixels=_H1_PIXELS, spread=_IMAGE_SPREAD / 3
    )
    values = [
        float(nodes),
        shape.median_edge,
        float(h0.num_essential),
        *_lifetime_statistics(h0, nodes),
        *_lifetime_statistics(h1, sampled),
        *(h0.betti(scale) / nodes for scale in BETTI_SCALES),
        *(h1.betti(scale) / sampled for scale in BETTI_SCALES),
        *(h0_image / nodes).tolist(),
        *(h1_image / sampled).ravel().tolist(),
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
