"""Persistence diagrams: births and deaths of the classes of one dimension.

Legend: P classes of a diagram.

Distances of persistence diagrams, by hera (BSD), never by `gudhi.bottleneck` (GPL).

Diagrams do not identify nodes: a swarm in which two regions swapped places has distance 0. Triggers
therefore compare cophenetic heights (`nesa_node/topology/changes`); these distances are for display
and for clustering snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from nesa_node.core.arrays import Floats
from nesa_node.topology.shape.gudhi_backend import hera_bottleneck, hera_wasserstein


@dataclass(frozen=True, slots=True, eq=False)
class PersistenceDiagram:
    """Classes of H`dimension`, longest-lived first. A class that never dies has death inf.

    Classes that die as they are born are left out.

    birth_P, death_P : [P] float64.
    """

    dimension: int
    birth_P: Floats
    death_P: Floats

    def __len__(self) -> int:
        return len(self.birth_P)

    @property
    def lifetime_P(self) -> Floats:
        return self.death_P - self.birth_P

    @property
    def num_essential(self) -> int:
        """Number of classes that never die."""
        return int(np.isinf(self.death_P).sum())

    def betti(self, scale: float) -> int:
        """Betti number at `scale`: the number of live classes, simplices of `scale` included."""
        return int(((self.birth_P <= scale) & (scale < self.death_P)).sum())

    def barcode(self, max_bars: int | None = None) -> tuple[tuple[float, float], ...]:
        """(birth, death) of the `most` longest bars."""
        bars = zip(self.birth_P.tolist(), self.death_P.tolist(), strict=True)
        return tuple(bars)[:max_bars]

    def as_P2(self) -> Floats:
        """Births and deaths as [P, 2] float64, the layout of other libraries."""
        return np.stack([self.birth_P, self.death_P], axis=1)


def make_diagram(dimension: int, birth_P: Floats, death_P: Floats) -> PersistenceDiagram:
    """Make a diagram: sort by lifetime, then birth; drop classes of zero lifetime."""
    birth_P = np.asarray(birth_P, dtype=np.float64)
    death_P = np.asarray(death_P, dtype=np.float64)
    lives = death_P > birth_P
    birth_P, death_P = birth_P[lives], death_P[lives]
    order = np.lexsort((birth_P, birth_P - death_P))
    return PersistenceDiagram(dimension, birth_P[order], death_P[order])


def betti_numbers(diagrams: Iterable[PersistenceDiagram], scale: float) -> tuple[int, ...]:
    """Betti numbers at `scale`, one per diagram."""
    return tuple(diagram.betti(scale) for diagram in diagrams)


def bottleneck_distance(
    first: PersistenceDiagram, second: PersistenceDiagram, *, relative_error: float = 0.01
) -> float:
    """Bottleneck distance; inf if the numbers of essential classes differ.

    At most (1 + `relative_error`) times the exact one. Raises `ValueError` if the diagrams have
    different dimensions.
    """
    _check_same_dimension(first, second)
    return hera_bottleneck(first.as_P2(), second.as_P2(), relative_error)


def wasserstein_distance(
    first: PersistenceDiagram,
    second: PersistenceDiagram,
    *,
    order: float = 1.0,
    relative_error: float = 0.01,
) -> float:
    """Wasserstein distance of `order`, with the maximum norm for points; errors as above."""
    _check_same_dimension(first, second)
    return hera_wasserstein(
        first.as_P2(), second.as_P2(), order=order, relative_error=relative_error
    )


def _check_same_dimension(first: PersistenceDiagram, second: PersistenceDiagram) -> None:
    if first.dimension != second.dimension:
        raise ValueError(f"H{first.dimension} cannot be compared with H{second.dimension}")
