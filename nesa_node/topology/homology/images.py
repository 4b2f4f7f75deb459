"""Persistence images: diagrams as arrays of fixed size (Adams et al., JMLR 18, 2017).

Legend: P classes, X pixels along birth, Y pixels along lifetime.
"""

from __future__ import annotations

import numpy as np

from nesa_node.topology.homology.diagrams import Diagram
from nesa_node.topology.homology.filtration import Floats


def persistence_image(
    diagram: Diagram,
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


def lifetime_image(diagram: Diagram, *, extent: float, pixels: int, spread: float) -> Floats:
    """Image [Y] float64 of lifetimes alone, for H0 of nodes that are all born at once."""
    from scipy.special import ndtr

    lifetime_P = diagram.lifetime_P[np.isfinite(diagram.death_P)]
    edge_Y = np.linspace(0.0, extent, pixels + 1)
    mass_PY = np.diff(ndtr((edge_Y - lifetime_P[:, None]) / spread), axis=1)
    image_Y: Floats = lifetime_P @ mass_PY
    return image_Y
