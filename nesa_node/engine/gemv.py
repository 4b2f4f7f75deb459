"""Matrix products for decoding: weights [O, I] times few tokens.

Decoding reads every weight once per step, so that memory bandwidth bounds it. These kernels read a
weight in memory order and prefetch far ahead. A token's result has the same bits for any batch.

T tokens, I inputs, O outputs, R rows of weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nesa_node.engine.machine_code import LINE, Function, Job, compiled

MOST_TOKENS = 8
LEAST_OUTPUTS = 2
"""Rows of weights that are read at a time."""
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Gemv:
    """Product x [T, I] -> x W^T + b [T, O] for up to `MOST_TOKENS` tokens of one dtype."""

    def __init__(self, products: list[Function]) -> None:
        """`products`: functions for 1, 2, ... tokens."""
        self._products = products

    def __call__(self, input_TI: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
        """Return the product [T, O] in the dtype of `weight_OI`, which `fits`.

        `input_TI` has that dtype, `bias_O` is float32 and contiguous. Sums are float32, rounded
        once. Runs on torch's threads.
        """
        input_TI = input_TI.float().contiguous()
        output_TO = torch.empty(len(input_TI), len(weight_OI), dtype=weight_OI.dtype)
        self.job(input_TI, weight_OI, bias_O, output_TO).run()
        return output_TO

    def job(self, input_TI: Tensor, weight_OI: Tensor, bias_O: Tensor, output_TO: Tensor) -> Job:
        """Return a call that writes the product of contiguous float32 `input_TI` to `output_TO`."""
        outputs, inputs = weight_OI.shape
        return self._products[len(input_TI) - 1].job(
            weight_OI.data_ptr(),
            input_TI.data_ptr(),
            bias_O.data_ptr(),
            output_TO.data_ptr(),
            inputs,
            outputs,
            threads=torch.get_num_threads(),
        )


def gemv(dtype: torch.dtype) -> Gemv | None:
    """Return the products of a dtype; None if it is unsupported or cannot be compiled."""
    if dtype not in NAMES:
        return None
    wanted = [("product", NAMES[dtype], tokens) for tokens in range(1, MOST_TOKENS + 1)]
    products = compiled(*wanted)
    return None if products is None else Gemv(products)


def fits(weight_OI: Tensor) -> bool:
    """Whether the products support a weight's shape, layout and device.

    Its rows must be whole cache lines.
    """
    return (
        weight_OI.device.type == "cpu"
        and weight_OI.is_contiguous()
        and len(weight_OI) >= LEAST_OUTPUTS
        and weight_OI.shape[1] * weight_OI.itemsize % LINE == 0
    )
