"""Products of many tokens with quantized weights, dequantized in chunks of rows.

T tokens, I inputs, O outputs, R rows of weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_UNPACKED_BYTES = 4 << 20
"""Bytes dequantized at a time, which stay in the cache. A quarter of it takes 1.2 x as long for 512
tokens."""
_UNIT = 256
"""Rows per chunk are a multiple of it; other numbers take torch 1.1 to 1.4 x as long."""
_MANY_TOKENS = 96
"""Tokens from which transposing the result costs more than the other order of the product."""


def product_by_rows(
    input_TI: Tensor,
    outputs: int,
    bias_O: Tensor | None,
    unpack: Callable[[int, Tensor], None],
) -> Tensor:
    """Return x W^T + b [T, O], all in the dtype of x, with torch's product of each chunk.

    `unpack(start, weight_RI)` dequantizes rows from `start` on, a multiple of 256, into a buffer
    that is reused for all chunks.
    """
    tokens, inputs = input_TI.shape
    step = max(_UNPACKED_BYTES // (inputs * input_TI.itemsize) // _UNIT, 1) * _UNIT
    weight_RI = input_TI.new_empty(min(step, outputs), inputs)
    shape = (outputs, tokens) if tokens < _MANY_TOKENS else (tokens, outputs)
    output = input_TI.new_empty(shape)
    output_OT = output if tokens < _MANY_TOKENS else output.t()
    for start in range(0, outputs, step):
        rows_RI, output_RT = weight_RI[: outputs - start], output_OT[start : start + step]
        unpack(start, rows_RI)
        if bias_O is None:
            torch.mm(rows_RI, input_TI.t(), out=output_RT)
        else:
            bias_R1 = bias_O.detach()[start : start + step].unsqueeze(1)
            torch.addmm(bias_R1, rows_RI, input_TI.t(), out=output_RT)
    return output_OT.t().contiguous()
