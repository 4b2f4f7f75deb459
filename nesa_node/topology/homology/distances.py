"""How far apart two persistence diagrams are, through hera (BSD), never `gudhi.bottleneck` (GPL).

Both forget which node is which: a swarm whose regions swapped places has distance 0. Triggers
therefore compare cophenetic matrices (`nesa_node/topology/changes`); these are for showing and for
clustering snapshots.
"""

from __future__ import annotations

from nesa_node.topology.homology import backend
from nesa_node.topology.homology.diagrams import Diagram


def bottleneck_distance(first: Diagram, second: Diagram, *, relative_error: float = 0.01) -> float:
    """The largest distance that the best matching moves a point; inf if essential counts differ.

    At most (1 + `relative_error`) times the true one. Raises `ValueError` for two dimensions.
    """
    _same_dimension(first, second)
    return backend.hera_bottleneck(first.as_P2(), second.as_P2(), relative_error)


def wasserstein_distance(
    first: Diagram, second: Diagram, *, order: float = 1.0, relative_error: float = 0.01
) -> float:
    """The `order`-norm of all moves of the best matching, each by its larger coordinate."""
    _same_dimension(first, second)
    return backend.hera_wasserstein(
        first.as_P2(), second.as_P2(), order=order, relative_error=relative_error
    )


def _same_dimension(first: Diagram, second: Diagram) -> None:
    if first.dimension != second.dimension:
        raise ValueError(f"H{first.dimension} cannot be compared with H{second.dimension}")
