"""The Walsh-Hadamard transform of blocks: a rotation that spreads every value over its block.

Legend: N blocks, B values of a block, a power of two.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def hadamard(values_NB: Tensor) -> Tensor:
    """Multiply each block by the matrix whose entries are (-1)^popcount(i & j). float32; a copy.

    Applied twice it multiplies by B. Exact where all sums are below 2^24 and the values integers
    (below 2^8 also where torch may multiply in fewer bits); of others each device rounds the sums
    in an order of its own. Additions in log2(B) rounds, as the transform is commonly computed, take
    ten times as long: each is an operation on strided memory.
    """
    # With `out`, autocast keeps its hands off.
    matrix = _matrix(values_NB.shape[1], values_NB.device)
    return torch.mm(values_NB, matrix, out=torch.empty_like(values_NB))


@functools.lru_cache(maxsize=32)
def _matrix(block: int, device: torch.device) -> Tensor:
    """[B, B] float32, of Sylvester's doubling: H, H above H, -H."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < block:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix
