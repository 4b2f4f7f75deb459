"""Persistence diagrams: births and deaths of the classes of one dimension.

Legend: P classes of a diagram.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from nesa_node.core.arrays import Floats


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
