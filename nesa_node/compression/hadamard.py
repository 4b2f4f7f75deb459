"""Walsh-Hadamard transform of blocks, which spreads every value over its block.

Legend: N blocks, B values of a block, a power of two.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def hadamard(values_NB: Tensor) -> Tensor:
    """Multiply each block by the matrix with entries (-1)^popcount(i & j). float32; a copy.

    Applied twice it multiplies by B. Exact for integers if all sums are below 2^24 (and values
    below 2^8 if torch may multiply in reduced precision); for other values each device rounds sums
    in its own order. The usual log2(B) rounds of additions take ten times as long, since each is an
    operation on strided memory.
    """
    # Autocast does not apply to operations with `out`.
    matrix = _matrix(values_NB.shape[1], values_NB.device)
    return torch.mm(values_NB, matrix, out=torch.empty_like(values_NB))


@functools.lru_cache(maxsize=32)
def _matrix(block: int, device: torch.device) -> Tensor:
    """The Hadamard matrix, float32 [B, B], by Sylvester's construction [[H, H], [H, -H]]."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < block:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix
