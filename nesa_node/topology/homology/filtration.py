"""Filtrations: weighted graphs in which nodes and edges appear at increasing scales.

Legend: N nodes, R rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Large matrices are read this many rows at a time: temporaries stay small beside the matrix.
_ROWS = 256
_SAMPLED_ROWS = 500


@dataclass(frozen=True, slots=True, eq=False)
class Filtration:
    """Weighted graph; at scale t it has the nodes born by t and the edges of weight at most t.

    Made by `make_filtration` only, which ensures that no edge is born before its ends.

    weight_NN : [N, N] float64, symmetric, diagonal 0, inf where there is no edge; read-only.
    birth_N : [N] float64, finite; read-only.
    """

    weight_NN: Floats
    birth_N: Floats

    def __len__(self) -> int:
        return len(self.birth_N)

    def restricted(self, nodes: Sequence[int] | Ints) -> Filtration:
        """The filtration induced by `nodes`, in their order."""
        chosen = np.asarray(nodes, dtype=np.int64)
        return Filtration(
            _read_only(self.weight_NN[np.ix_(chosen, chosen)]), _read_only(self.birth_N[chosen])
        )

    def largest_weight(self) -> float:
        """Largest finite weight; 0.0 without edges."""
        return max(
            (
                float(np.max(rows, initial=0.0, where=np.isfinite(rows)))
                for _, rows in row_blocks(self.weight_NN)
            ),
            default=0.0,
        )

    def median_weight(self) -> float:
        """Median finite weight, the unit of other figures; 0.0 without edges.

        Beyond 500 nodes it is the median of 500 evenly spaced rows.
        """
        step = -(-len(self) // _SAMPLED_ROWS) or 1
        rows = np.arange(0, len(self), step)
        sample = self.weight_NN[rows]
        sample[np.arange(len(rows)), rows] = np.inf
        finite = sample[np.isfinite(sample)]
        return float(np.median(finite)) if len(finite) else 0.0


def make_filtration(weight_NN: Floats, birth_N: Floats | None = None) -> Filtration:
    """Make a filtration; an edge born before one of its ends is raised to that end's birth.

    Weights are copied only if an edge is raised; neither argument is modified. Without `birth_N`
    nodes are born at 0. Raises `ValueError` for a matrix that is not square and symmetric with a
    zero diagonal, for NaN, a negative weight, or a birth that is not finite.
    """
    weight_NN = np.asarray(weight_NN, dtype=np.float64)
    if weight_NN.ndim != 2 or weight_NN.shape[0] != weight_NN.shape[1]:
        raise ValueError(f"weights must be a square matrix, not {weight_NN.shape}")
    count = len(weight_NN)
    birth_N = np.zeros(count) if birth_N is None else np.array(birth_N, dtype=np.float64)
    if birth_N.shape != (count,) or not np.isfinite(birth_N).all():
        raise ValueError(f"births must be {count} finite numbers, one per node")
    if np.any(np.diagonal(weight_NN) != 0):
        raise ValueError("the weight of a node to itself must be 0: births go into `birth_N`")
    raises = False
    for start, rows in row_blocks(weight_NN):
        if not (rows >= 0).all():
            raise ValueError("a weight is negative or NaN; give inf where there is no edge")
        if not np.array_equal(rows, weight_NN[:, start : start + len(rows)].T):
            raise ValueError("weights differ by direction: make them symmetric first")
        raises = raises or bool((rows < _oldest(birth_N, start, rows)).any())
    if raises:
        weight_NN = weight_NN.copy()
        for start, rows in row_blocks(weight_NN):
            np.maximum(rows, _oldest(birth_N, start, rows), out=rows)
        np.fill_diagonal(weight_NN, 0.0)
    return Filtration(_read_only(weight_NN), _read_only(birth_N))


def _oldest(birth_N: Floats, start: int, rows: Floats) -> Floats:
    """Birth of the later end of each edge, [R, N]; 0 on the diagonal."""
    first_R = birth_N[start : start + len(rows)]
    later: Floats = np.maximum(first_R[:, None], birth_N)
    later[np.arange(len(rows)), np.arange(start, start + len(rows))] = 0.0
    return later


def row_blocks(matrix: Floats) -> Iterator[tuple[int, Floats]]:
    """Yield views of up to `_ROWS` rows each, with the index of the first."""
    for start in range(0, len(matrix), _ROWS):
        yield start, matrix[start : start + _ROWS]


def _read_only(array: Floats) -> Floats:
    view = array.view()
    view.flags.writeable = False
    return view
