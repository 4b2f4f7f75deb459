"""The Walsh-Hadamard transform of blocks: a rotation that spreads every value over its block.

Legend: N blocks, B values of a block, a power of two.
"""

from __future__ import annotations

import torch
from torch import Tensor


_PIECE = 4096
"""Blocks at a time: what is computed in between stays in the processor's cache."""


def hadamard(values_NB: Tensor) -> Tensor:
    """Multiply each block by the matrix whose entries are (-1)^popcount(i & j). float32; a copy.

    Applied twice it multiplies by B. log2(B) times over, the sums of neighbours (0 and 1, 2 and 3,
    ...) become the block's first half and their differences the second. In this order on every
    device; a matrix product would add in another one on each.
    """
    pieces = [_transformed(piece_NB) for piece_NB in torch.split(values_NB, _PIECE)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _transformed(values_NB: Tensor) -> Tensor:
    count, block = values_NB.shape
    for _ in range(block.bit_length() - 1):
        even, odd = values_NB.view(count, block // 2, 2).unbind(-1)
        values_NB = torch.cat((even + odd, even - odd), dim=1)
    return values_NB
