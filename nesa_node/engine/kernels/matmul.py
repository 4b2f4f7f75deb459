"""Matrix products for decoding: weights [O, I] times few tokens.

Decoding reads every weight once per step, so that memory bandwidth bounds it. These kernels read a
weight in memory order and prefetch far ahead. A token's result has the same bits for any batch.

T tokens, I inputs, O outputs, R rows of weights.

Products in bfloat16 for up to 32 tokens, by AMX.

They read a weight once for all tokens, at memory bandwidth for up to 16. A token's result has the
same bits for any batch.

T tokens, I inputs, O outputs.

Products of many tokens with quantized weights, dequantized in chunks of rows.

T tokens, I inputs, O outputs, R rows of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nesa_node.engine.kernels.machine_code import (
    CACHE_LINE_BYTES,
    KernelCall,
    NativeFunction,
    compile_functions,
)

GEMV_MAX_TOKENS = 8
GEMV_MIN_OUTPUTS = 2
"""Rows of weights that are read at a time."""
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Gemv:
    """Product x [T, I] -> x W^T + b [T, O] for up to `GEMV_MAX_TOKENS` tokens of one dtype."""

    def __init__(self, functions: list[NativeFunction]) -> None:
        """`functions`: functions for 1, 2, ... tokens."""
        self._functions = functions

    def __call__(self, input_TI: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
        """Return the product [T, O] in the dtype of `weight_OI`, which `supports_gemv`.

        `input_TI` has that dtype, `bias_O` is float32 and contiguous. Sums are float32, rounded
        once. Runs on torch's threads.
        """
        input_TI = input_TI.float().contiguous()
        output_TO = torch.empty(len(input_TI), len(weight_OI), dtype=weight_OI.dtype)
        self.bind(input_TI, weight_OI, bias_O, output_TO).run()
        return output_TO

    def bind(
        self, input_TI: Tensor, weight_OI: Tensor, bias_O: Tensor, output_TO: Tensor
    ) -> KernelCall:
        """Return a call that writes the product of contiguous float32 `input_TI` to `output_TO`."""
        outputs, inputs = weight_OI.shape
        return self._functions[len(input_TI) - 1].bind(
            weight_OI.data_ptr(),
            input_TI.data_ptr(),
            bias_O.data_ptr(),
            output_TO.data_ptr(),
            inputs,
            outputs,
            threads=torch.get_num_threads(),
        )


def load_gemv(dtype: torch.dtype) -> Gemv | None:
    """Return the products of a dtype; None if it is unsupported or cannot be compiled."""
    if dtype not in DTYPE_NAMES:
        return None
    wanted = [("product", DTYPE_NAMES[dtype], tokens) for tokens in range(1, GEMV_MAX_TOKENS + 1)]
    products = compile_functions(*wanted)
    return None if products is None else Gemv(products)


def supports_gemv(weight_OI: Tensor) -> bool:
    """Whether the products support a weight's shape, layout and device.

    Its rows must be whole cache lines.
    """
    return (
        weight_OI.device.type == "cpu"
        and weight_OI.is_contiguous()
        and len(weight_OI) >= GEMV_MIN_OUTPUTS
        and weight_OI.shape[1] * weight_OI.itemsize % CACHE_LINE_BYTES == 0
    )


TILE_TOKENS = 16
AMX_MAX_TOKENS = 2 * TILE_TOKENS
AMX_MIN_OUTPUTS = 32
"""Rows of weights that are read at a time."""


class AmxMatmul:
    """AMX product x [T, I] -> x W^T + b [T, O] for up to `AMX_MAX_TOKENS` tokens."""

    def __init__(self, functions: list[NativeFunction]) -> None:
        """`functions`: functions for one tile of tokens, and for two."""
        self._functions = functions

    def __call__(self, input_TI: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
        """Return the product [T, O] with a weight that `supports_amx`.

        All are bfloat16, except `bias_O` in float32. Sums are float32, rounded once.
        """
        room = torch.empty(count_scratch_items(*input_TI.shape), dtype=torch.int32)
        output_TO = torch.empty(len(input_TI), len(weight_OI), dtype=weight_OI.dtype)
        for call in self.bind_calls(input_TI.contiguous(), room, weight_OI, bias_O, output_TO):
            call()
        return output_TO

    def bind_calls(
        self,
        input_TI: Tensor,
        pairs_scratch: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor,
        output_TO: Tensor,
    ) -> list[Callable[[], object]]:
        """Return calls that write the product of the contents of `input_TI` to `output_TO`.

        `room`: int32 scratch memory of `count_scratch_items(T, I)` items. All tensors are
        contiguous, and the caller keeps them alive.
        """
        tokens, (outputs, inputs) = len(input_TI), weight_OI.shape
        wide = _count_token_tiles(tokens)
        # Transposed to pairs of inputs, as AMX multiplies them. Unused columns yield sums that are
        # discarded.
        pairs = pairs_scratch.view(inputs // 2, TILE_TOKENS * wide)[:, :tokens]
        job = self._functions[wide - 1].bind(
            weight_OI.data_ptr(),
            pairs_scratch.data_ptr(),
            bias_O.data_ptr(),
            output_TO.data_ptr(),
            inputs,
            outputs,
            tokens,
            threads=torch.get_num_threads(),
        )
        return [partial(pairs.copy_, input_TI.view(torch.int32).t()), job.run]


def count_scratch_items(tokens: int, inputs: int) -> int:
    return inputs // 2 * TILE_TOKENS * _count_token_tiles(tokens)


def load_amx_matmul(dtype: torch.dtype) -> AmxMatmul | None:
    """Return the AMX products of a dtype; None where AMX does not support it or is missing."""
    cpu: Any = torch.cpu
    # Linux grants the use of tiles per process.
    if dtype != torch.bfloat16 or not cpu._is_amx_tile_supported() or not cpu._init_amx():
        return None
    products = compile_functions(("tiles", "bfloat16", 1), ("tiles", "bfloat16", 2))
    return None if products is None else AmxMatmul(products)


def supports_amx(weight_OI: Tensor) -> bool:
    """Whether the products support a weight's shape, layout and device."""
    return supports_gemv(weight_OI) and len(weight_OI) >= AMX_MIN_OUTPUTS


def _count_token_tiles(tokens: int) -> int:
    return -(-tokens // TILE_TOKENS)


_UNPACK_CHUNK_BYTES = 4 << 20
"""Bytes dequantized at a time, which stay in the cache. A quarter of it takes 1.2 x as long for 512
tokens."""
_ROW_MULTIPLE = 256
"""Rows per chunk are a multiple of it; other numbers take torch 1.1 to 1.4 x as long."""
_MIN_UNTRANSPOSED_TOKENS = 96
"""Tokens from which transposing the result costs more than the other order of the product."""


def multiply_by_row_chunks(
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
    step = (
        max(_UNPACK_CHUNK_BYTES // (inputs * input_TI.itemsize) // _ROW_MULTIPLE, 1) * _ROW_MULTIPLE
    )
    weight_RI = input_TI.new_empty(min(step, outputs), inputs)
    shape = (outputs, tokens) if tokens < _MIN_UNTRANSPOSED_TOKENS else (tokens, outputs)
    output = input_TI.new_empty(shape)
    output_OT = output if tokens < _MIN_UNTRANSPOSED_TOKENS else output.t()
    for start in range(0, outputs, step):
        rows_RI, output_RT = weight_RI[: outputs - start], output_OT[start : start + step]
        unpack(start, rows_RI)
        if bias_O is None:
            torch.mm(rows_RI, input_TI.t(), out=output_RT)
        else:
            bias_R1 = bias_O.detach()[start : start + step].unsqueeze(1)
            torch.addmm(bias_R1, rows_RI, input_TI.t(), out=output_RT)
    return output_OT.t().contiguous()
