"""Distances of persistence diagrams, by hera (BSD), never by `gudhi.bottleneck` (GPL).

Diagrams do not identify nodes: a swarm in which two regions swapped places has distance 0. Triggers
therefore compare cophenetic heights (`nesa_node/topology/changes`); these distances are for display
and for clustering snapshots.
"""

from __future__ import annotations

from nesa_node.topology.homology import backend
from nesa_node.topology.homology.diagrams import Diagram


def bottleneck_distance(first: Diagram, second: Diagram, *, relative_error: float = 0.01) -> float:
    """Bottleneck distance; inf if the numbers of essential classes differ.

    At most (1 + `relative_error`) times the exact one. Raises `ValueError` if the diagrams have
    different dimensions.
    """
    _same_dimension(first, second)
    return backend.hera_bottleneck(first.as_P2(), second.as_P2(), relative_error)


def wasserstein_distance(
    first: Diagram, second: Diagram, *, order: float = 1.0, relative_error: float = 0.01
) -> float:
    """Wasserstein distance of `order`, with the maximum norm for points; errors as above."""
    _same_dimension(first, second)
    return backend.hera_wasserstein(
        first.as_P2(), second.as_P2(), order=order, relative_error=relative_error
    )


def _same_dimension(first: Diagram, second: Diagram) -> None:
    if first.dimension != second.dimension:
        raise ValueError(f"H{first.dimension} cannot be compared with H{second.dimension}")
