"""Low-rank products y += s B (A x) of few tokens in machine code (`native/low_rank.py`).

The slow reference of its tests is torch's product of each token with its adapter's matrices.

A matrix of few rows is read at the speed of memory, so that on one core a token's product costs as
much more as an adapter is large: 2 to 5 % of the weights for ranks 8 to 32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from nesa_node.engine.kernels.linear import DTYPE_NAMES
from nesa_node.engine.kernels.machine_code import NativeFunction, compile_functions

BLOCK_OUTPUTS, SMALL_BLOCK_OUTPUTS = 64, 16
"""Outputs of a block of B^T, and of those that hold what is left over: all sizes are multiples."""
ROWS_AT_ONCE = 4
"""Rows of A that are multiplied at a time; their number is a multiple of it."""
TABLE_FIELDS, SEGMENT_FIELDS, DESCRIPTOR_FIELDS, PART_FIELDS = 5, 3, 4, 5
"""Numbers of int64 in the structures that `native/low_rank.py` describes."""


class LowRankFunctions(NamedTuple):
    """Machine code for one dtype."""

    shrink: NativeFunction
    expand: NativeFunction


def load_low_rank(
    dtype: torch.dtype, device: torch.device, sizes: Iterable[int]
) -> LowRankFunctions | None:
    """Return the products for layers with these numbers of inputs and outputs.

    None where they are unsupported or cannot be compiled: torch's operations have to do.
    """
    if device.type != "cpu" or dtype not in DTYPE_NAMES:
        return None
    if any(size % SMALL_BLOCK_OUTPUTS for size in sizes):
        return None
    name = DTYPE_NAMES[dtype]
    functions = compile_functions(("lora_shrink", name), ("lora_expand", name))
    return None if functions is None else LowRankFunctions(*functions)


def to_blocks(b_rO: Tensor) -> Tensor:
    """Return B^T in the order in which machine code reads it, [r * O]."""
    rank, count = b_rO.shape
    whole = count - count % BLOCK_OUTPUTS
    parts = (b_rO[:, :whole], BLOCK_OUTPUTS), (b_rO[:, whole:], SMALL_BLOCK_OUTPUTS)
    return torch.cat([part.reshape(rank, -1, n).transpose(0, 1).flatten() for part, n in parts])


def from_blocks(blocks: Tensor, rank: int) -> Tensor:
    """Return a copy of B^T, [r, O], of what `to_blocks` returned."""
    count = len(blocks) // rank
    items = rank * (count - count % BLOCK_OUTPUTS)
    parts = (blocks[:items], BLOCK_OUTPUTS), (blocks[items:], SMALL_BLOCK_OUTPUTS)
    return torch.cat([part.view(-1, rank, n).transpose(0, 1).flatten(1) for part, n in parts], 1)
