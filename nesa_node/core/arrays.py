"""Types of numpy arrays, and large ones in parts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_ROWS_PER_BLOCK = 256


def row_blocks(matrix: Floats) -> Iterator[tuple[int, Floats]]:
    """Yield views of up to 256 rows each, with the index of the first.

    What is computed of one of them is small beside the matrix.
    """
    for start in range(0, len(matrix), _ROWS_PER_BLOCK):
        yield start, matrix[start : start + _ROWS_PER_BLOCK]
