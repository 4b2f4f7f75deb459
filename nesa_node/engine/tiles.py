"""Products in bfloat16 for up to 32 tokens, by AMX.

They read a weight once for all tokens, at memory bandwidth for up to 16. A token's result has the
same bits for any batch.

T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nesa_node.engine.gemv import fits
from nesa_node.engine.machine_code import Function, compiled

TILE_TOKENS = 16
MOST_TOKENS = 2 * TILE_TOKENS
LEAST_OUTPUTS = 32
"""Rows of weights that are read at a time."""


class Tiles:
    """AMX product x [T, I] -> x W^T + b [T, O] for up to `MOST_TOKENS` tokens."""

    def __init__(self, products: list[Function]) -> None:
        """`products`: functions for one tile of tokens, and for two."""
        self._products = products

    def __call__(self, input_TI: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
        """Return the product [T, O] with a weight that `suits`.

        All are bfloat16, except `bias_O` in float32. Sums are float32, rounded once.
        """
        room = torch.empty(room_for(*input_TI.shape), dtype=torch.int32)
        output_TO = torch.empty(len(input_TI), len(weight_OI), dtype=weight_OI.dtype)
        for call in self.calls(input_TI.contiguous(), room, weight_OI, bias_O, output_TO):
            call()
        return output_TO

    def calls(
        self, input_TI: Tensor, room: Tensor, weight_OI: Tensor, bias_O: Tensor, output_TO: Tensor
    ) -> list[Callable[[], object]]:
        """Return calls that write the product of the contents of `input_TI` to `output_TO`.

        `room`: int32 scratch memory of `room_for(T, I)` items. All tensors are contiguous, and the
        caller keeps them alive.
        """
        tokens, (outputs, inputs) = len(input_TI), weight_OI.shape
        wide = _wide(tokens)
        # Transposed to pairs of inputs, as AMX multiplies them. Unused columns yield sums that are
        # discarded.
        pairs = room.view(inputs // 2, TILE_TOKENS * wide)[:, :tokens]
        job = self._products[wide - 1].job(
            weight_OI.data_ptr(),
            room.data_ptr(),
            bias_O.data_ptr(),
            output_TO.data_ptr(),
            inputs,
            outputs,
            tokens,
            threads=torch.get_num_threads(),
        )
        return [partial(pairs.copy_, input_TI.view(torch.int32).t()), job.run]


def room_for(tokens: int, inputs: int) -> int:
    return inputs // 2 * TILE_TOKENS * _wide(tokens)


def tiles(dtype: torch.dtype) -> Tiles | None:
    """Return the AMX products of a dtype; None where AMX does not support it or is missing."""
    cpu: Any = torch.cpu
    # Linux grants the use of tiles per process.
    if dtype != torch.bfloat16 or not cpu._is_amx_tile_supported() or not cpu._init_amx():
        return None
    products = compiled(("tiles", "bfloat16", 1), ("tiles", "bfloat16", 2))
    return None if products is None else Tiles(products)


def suits(weight_OI: Tensor) -> bool:
    """Whether the products support a weight's shape, layout and device."""
    return fits(weight_OI) and len(weight_OI) >= LEAST_OUTPUTS


def _wide(tokens: int) -> int:
    return -(-tokens // TILE_TOKENS)
