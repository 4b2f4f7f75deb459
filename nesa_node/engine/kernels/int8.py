"""Linear layers with int8 weights, in the format of bitsandbytes' LLM.int8().

A row of weights has 127 levels to either side and a scale, its largest absolute value. Inputs are
not quantized, unlike in LLM.int8(): `docs/decisions/008` says why. On the CPU machine code computes
(`native/int8.py`): small batches read int8 weights directly, for large ones they are dequantized
first. Time for 8 million weights on one core of a Xeon with AVX-512 and AMX:

| tokens | ours | bfloat16 | bitsandbytes |
|-|-|-|-|
| 1 | 0.7 ms | 1.2 ms | 1.9 ms |
| 8 | 1.3 | 1.5 | 2.2 |
| 16 | 2.5 | 1.6 | |
| 64 | 3.9 | 2.2 | 5.6 |
| 128 | 5.0 | 3.4 | 11 |
| 512 | 11 | 9.5 | 47 |

Elsewhere torch dequantizes the whole layer. T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from nesa_node.core.errors import UnsupportedModelError
from nesa_node.engine.kernels import huge_pages
from nesa_node.engine.kernels.machine_code import NativeFunction, compile_functions
from nesa_node.engine.kernels.matmul import (
    DTYPE_NAMES,
    GEMV_MAX_TOKENS,
    multiply_by_row_chunks,
    supports_gemv,
)

MAX_LEVEL = 127
_QUANTIZE_CHUNK_BYTES = 8 << 20


class Int8Linear(nn.Module):
    """Linear layer with int8 weights: `x [..., I] -> x W^T + b [..., O]`, in the dtype of `x`."""

    def __init__(
        self, levels_OI: Tensor, scales_O: Tensor, bias_O: nn.Parameter | None, dtype: torch.dtype
    ) -> None:
        """`dtype`: inputs of this dtype use machine code. The bias may be assigned later."""
        super().__init__()
        self.out_features, self.in_features = levels_OI.shape
        self.levels = nn.Parameter(levels_OI, requires_grad=False)
        self.scales = nn.Parameter(scales_O, requires_grad=False)
        self.bias: nn.Parameter | None = bias_O
        self._dtype = dtype
        self._level_sizes_O = scales_O / MAX_LEVEL
        self._zeros_O = torch.zeros_like(scales_O)
        self._functions = _compile_functions(dtype) if supports_gemv(levels_OI) else None

    @classmethod
    def concatenate(cls, linears: Sequence[Int8Linear]) -> Int8Linear:
        """Return one layer with the concatenated outputs of `linears`."""
        known: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        return cls(
            huge_pages.concatenate([linear.levels for linear in linears]),
            torch.cat([linear.scales for linear in linears]),
            nn.Parameter(torch.cat(known), requires_grad=False) if known else None,
            linears[0]._dtype,
        )

    def forward(self, input: Tensor) -> Tensor:
        """Supports gradients of the inputs only."""
        input_TI = input.reshape(-1, self.in_features)
        tokens = len(input_TI)
        with_gradients = torch.is_grad_enabled() and input.requires_grad
        if self._functions is None or not tokens or with_gradients or input.dtype != self._dtype:
            output_TO = functional.linear(input_TI, self.dequantize(input.dtype), self.bias)
        elif tokens > GEMV_MAX_TOKENS:
            output_TO = self._multiply_many(self._functions[0], input_TI)
        else:
            output_TO = self._multiply_few(self._functions[tokens], input_TI)
        return output_TO.view(*input.shape[:-1], self.out_features)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [O, I]."""
        weight_OI = torch.empty(self.levels.shape, dtype=dtype, device=self.levels.device)
        return torch.mul(self.levels, self._level_sizes_O.unsqueeze(1), out=weight_OI)

    def _multiply_few(self, product: NativeFunction, input_TI: Tensor) -> Tensor:
        """Sums in float32 and rounds once: a token's bits do not depend on the batch."""
        bias_O = self._zeros_O if self.bias is None else self.bias.float()
        wide_TI = input_TI.float().contiguous()
        output_TO = torch.empty(len(input_TI), self.out_features, dtype=input_TI.dtype)
        product(
            self.levels.data_ptr(),
            wide_TI.data_ptr(),
            bias_O.data_ptr(),
            output_TO.data_ptr(),
            self.in_features,
            self.out_features,
            self._level_sizes_O.data_ptr(),
            threads=torch.get_num_threads(),
        )
        return output_TO

    def _multiply_many(self, unpack: NativeFunction, input_TI: Tensor) -> Tensor:
        def unpacked(start: int, weight_RI: Tensor) -> None:
            unpack(
                self.levels.data_ptr() + start * self.in_features,
                self._level_sizes_O.data_ptr() + start * self._level_sizes_O.itemsize,
                weight_RI.data_ptr(),
                self.in_features,
                len(weight_RI),
                threads=torch.get_num_threads(),
            )

        return multiply_by_row_chunks(input_TI, self.out_features, self.bias, unpacked)


def quantize(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return levels [O, I] in int8 and scales [O] in float32 of weights in any floating dtype.

    Bit-identical to `bitsandbytes.functional.int8_vectorwise_quant` of the weights in float16.
    Raises `UnsupportedModelError` for weights beyond the range of float16.
    """
    outputs, inputs = weight_OI.shape
    levels_OI = huge_pages.empty((outputs, inputs), torch.int8)
    scales_O = torch.empty(outputs, dtype=torch.float32)
    # In chunks of rows: intermediates take ten times the memory of the levels.
    step = max(_QUANTIZE_CHUNK_BYTES // (4 * max(inputs, 1)), 1)
    for start in range(0, outputs, step):
        half = weight_OI[start : start + step].half()
        scales = half.abs().amax(1).float()
        scales_O[start : start + step] = scales
        level = half * (MAX_LEVEL / scales.unsqueeze(1))
        # The level of a zero row is 0 / 0.
        levels_OI[start : start + step] = level.nan_to_num_(0).round_()
    if not torch.isfinite(scales_O).all():
        raise UnsupportedModelError(
            "this model has weights beyond 65504, the largest number of 16 bits: it cannot be "
            "held in int8; use --quant-type none"
        )
    return levels_OI, scales_O


def compute_nbytes(outputs: int, inputs: int) -> int:
    """Return the bytes of a quantized weight."""
    return outputs * (inputs + torch.float32.itemsize)


def _compile_functions(dtype: torch.dtype) -> list[NativeFunction] | None:
    """Return the dequantizing function, then the products of 1, 2, ... `MOST_TOKENS` tokens."""
    if dtype not in DTYPE_NAMES:
        return None
    name = DTYPE_NAMES[dtype]
    products = [("int8_product", name, tokens) for tokens in range(1, GEMV_MAX_TOKENS + 1)]
    return compile_functions(("int8_unpack", name), *products)
