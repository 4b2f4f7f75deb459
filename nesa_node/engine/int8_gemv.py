"""Products of a few tokens with weights in int8: `native/int8.py`, and where it keeps its numbers.

T tokens, I inputs, O outputs, C chunks of columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nesa_node.engine.gemv import LEAST_OUTPUTS, MOST_TOKENS, NAMES
from nesa_node.engine.machine_code import LINE, Function, compiled


class Int8Gemv:
    """x [T, I] -> x W^T + b [T, O] for up to `MOST_TOKENS` tokens of one dtype.

    A token's result has the same bits whatever it is batched with.
    """

    def __init__(self, split: Function, products: list[Function]) -> None:
        """`products`: those for one token, for two, ..."""
        self._split, self._products = split, products

    def __call__(
        self, input_TI: Tensor, levels_OI: Tensor, steps_O: Tensor, bias_O: Tensor
    ) -> Tensor:
        """Return the product [T, O] in the dtype of `input_TI`, one of those of `gemv.NAMES`.

        `levels_OI` is int8 and `fits`, a level of row o is worth `steps_O[o]`; `steps_O` and
        `bias_O` are float32 and contiguous. Summed in 32 bits and rounded once. Runs on torch's
        threads.
        """
        input_TI = input_TI.contiguous()
        tokens, (outputs, inputs) = len(input_TI), levels_OI.shape
        output_TO = torch.empty(tokens, outputs, dtype=input_TI.dtype)
        scratch = torch.empty(_scratch_bytes(tokens, inputs), dtype=torch.uint8)
        split = _split_fields(scratch.data_ptr(), tokens, inputs)
        self._split(input_TI.data_ptr(), *split, tokens, inputs)
        self._products[tokens - 1](
            levels_OI.data_ptr(),
            *split,
            steps_O.data_ptr(),
            bias_O.data_ptr(),
            output_TO.data_ptr(),
            inputs,
            outputs,
            threads=torch.get_num_threads(),
        )
        return output_TO


def int8_gemv(dtype: torch.dtype) -> Int8Gemv | None:
    """Return the products of a dtype; None if it has none, or where they cannot be had."""
    if dtype not in NAMES:
        return None
    name = NAMES[dtype]
    wanted = [("int8_product", name, tokens) for tokens in range(1, MOST_TOKENS + 1)]
    made = compiled(("int8_split", name), *wanted)
    return None if made is None else Int8Gemv(made[0], made[1:])


def fits(levels_OI: Tensor) -> bool:
    """Whether a weight has the shape, the layout and the place that products need."""
    return (
        levels_OI.dtype == torch.int8
        and levels_OI.device.type == "cpu"
        and levels_OI.is_contiguous()
        and len(levels_OI) >= LEAST_OUTPUTS
        and levels_OI.shape[1] > 0
        and levels_OI.shape[1] % LINE == 0
    )


def _sizes(tokens: int, inputs: int) -> tuple[int, ...]:
    """Bytes of levels, floats, scales, lists of chunks and their lengths, each in whole lines."""
    sizes = (
        tokens * inputs,
        4 * tokens * inputs,
        4 * tokens,
        # Where a chunk has nothing to list, its place is written all the same.
        8 * tokens * (inputs // LINE),
        8 * tokens,
    )
    return tuple(-(-size // LINE) * LINE for size in sizes)


def _scratch_bytes(tokens: int, inputs: int) -> int:
    return sum(_sizes(tokens, inputs))


def _split_fields(start: int, tokens: int, inputs: int) -> tuple[int, ...]:
    """Where each of them begins."""
    starts = []
    for size in _sizes(tokens, inputs):
        starts.append(start)
        start += size
    return tuple(starts)
