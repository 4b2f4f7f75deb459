"""Linear layers with weights in int8: LLM.int8() in bitsandbytes' format.

A row of weights is 127 levels to either side and a scale, its largest size. Inputs are split, token
by token, into levels and outliers (|x| >= 6), which are multiplied as they are: see
`native/int8.py`. bitsandbytes' kernels do it on CUDA; on the CPU it takes, for 8 million weights on
one core of a Xeon with AVX-512 and AMX:

| tokens | ours | bfloat16 | bitsandbytes |
|-|-|-|-|
| 1 | 0.5 ms | 1.5 ms | 1.9 ms |
| 8 | 1.1 | 1.9 | 2.2 |
| 64 | 3.1 | 3.1 | 5.6 |
| 128 | 5.6 | 4.6 | 11 |
| 512 | 23 | 20 | 47 |

T tokens, I inputs, O outputs, K columns with outliers.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nesa_node.core.errors import UnsupportedModelError
from nesa_node.engine import huge_pages
from nesa_node.engine.gemv import MOST_TOKENS
from nesa_node.engine.int8_gemv import fits, int8_gemv

LEVELS = 127
THRESHOLD = 6.0
SMALLEST = 1e-30
"""Of a token's scale: nothing but zeros has none."""
_JUST_BELOW = THRESHOLD - 2**-21
"""In float32."""
_MOST_HALF = 65504.0
_ROUND_BYTES = 8 << 20
_MANY_TOKENS = 48
"""From so many on, to turn the result over costs more than the other order of the product."""


class Int8Linear(nn.Module):
    """`x [..., I] -> x W^T + b [..., O]`, in the dtype of `x`."""

    def __init__(
        self, levels_OI: Tensor, scales_O: Tensor, bias_O: nn.Parameter | None, dtype: torch.dtype
    ) -> None:
        """`dtype`: of the inputs to be fast for. The bias may be filled in later."""
        super().__init__()
        self.out_features, self.in_features = levels_OI.shape
        self.levels = nn.Parameter(levels_OI, requires_grad=False)
        self.scales = nn.Parameter(scales_O, requires_grad=False)
        self.bias: nn.Parameter | None = bias_O
        self._dtype = dtype
        self._steps_O = scales_O / LEVELS
        self._zeros_O = torch.zeros_like(scales_O)
        self._gemv = int8_gemv(dtype) if fits(levels_OI) else None

    @classmethod
    def joined(cls, linears: Sequence[Int8Linear]) -> Int8Linear:
        """One layer whose outputs are those of `linears`, one after another."""
        known: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        return cls(
            huge_pages.joined([linear.levels for linear in linears]),
            torch.cat([linear.scales for linear in linears]),
            nn.Parameter(torch.cat(known), requires_grad=False) if known else None,
            linears[0]._dtype,
        )

    def forward(self, input: Tensor) -> Tensor:
        """With gradients, those of the inputs through weights as they are stood for."""
        if torch.is_grad_enabled() and input.requires_grad:
            return functional.linear(input, self.dequantized(input.dtype), self.bias)
        input_TI = input.reshape(-1, self.in_features)
        if self.levels.device.type == "cuda":
            output_TO = self._bitsandbytes(input_TI)
        elif (
            self._gemv is not None
            and 0 < len(input_TI) <= MOST_TOKENS
            and input.dtype == self._dtype
        ):
            bias_O = self._zeros_O if self.bias is None else self.bias.float()
            output_TO = self._gemv(input_TI, self.levels, self._steps_O, bias_O)
        else:
            output_TO = self._of_many(input_TI)
        return output_TO.view(*input.shape[:-1], self.out_features)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weights [O, I]."""
        return (self.levels * self._steps_O.unsqueeze(1)).to(dtype)

    def _of_many(self, input_TI: Tensor) -> Tensor:
        half_TI = as_half(input_TI)
        outliers_TI = functional.hardshrink(half_TI, _JUST_BELOW)
        levels_TI, steps_T1 = rows_in_levels(half_TI - outliers_TI)
        sums_TO = self._sums(levels_TI).mul_(steps_T1)
        columns_K = (outliers_TI != 0).any(0).nonzero().squeeze(1)
        if len(columns_K):
            outliers_TK = input_TI[:, columns_K].float()
            outliers_TK.masked_fill_(outliers_TI[:, columns_K] == 0, 0)
            sums_TO.addmm_(outliers_TK, self.levels[:, columns_K].float().t())
        sums_TO.mul_(self._steps_O)
        if self.bias is not None:
            sums_TO.add_(self.bias)
        return sums_TO.to(input_TI.dtype)

    def _sums(self, levels_TI: Tensor) -> Tensor:
        """Sums of products of levels, in float32."""
        # With one input torch's product of bytes is wrong (2.13).
        if not _MULTIPLIES_BYTES or self.in_features == 1:
            return torch.mm(levels_TI, self.levels.float().t())
        bytes_TI = levels_TI.to(torch.int8)
        if len(bytes_TI) < _MANY_TOKENS:
            sums_TO = torch._int_mm(self.levels, bytes_TI.t()).t()
        else:
            sums_TO = torch._int_mm(bytes_TI, self.levels.t())
        return sums_TO.to(torch.float32, memory_format=torch.contiguous_format)

    def _bitsandbytes(self, input_TI: Tensor) -> Tensor:
        """Its outliers are whole columns of all tokens that come together."""
        # Only here: it takes seconds and 120 MB, and where the package `kernels` is installed it
        # runs code from the hub.
        bitsandbytes: Any = import_module("bitsandbytes")
        state = bitsandbytes.MatmulLtState()
        state.CB, state.SCB = self.levels, self.scales
        state.threshold, state.has_fp16_weights = THRESHOLD, False
        output_TO: Tensor = bitsandbytes.matmul(input_TI, self.levels, state=state, bias=self.bias)
        return output_TO


_MULTIPLIES_BYTES = torch.backends.cpu.get_cpu_capability() == "AVX512"
"""Elsewhere torch multiplies bytes one by one."""


def quantized(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return levels [O, I] in int8 and scales [O] in float32 of weights in any floating dtype.

    The very bytes of `bitsandbytes.functional.int8_vectorwise_quant` of the weights in float16.
    Raises `UnsupportedModelError` for weights that float16 does not reach to.
    """
    outputs, inputs = weight_OI.shape
    levels_OI = huge_pages.empty((outputs, inputs), torch.int8)
    scales_O = torch.empty(outputs, dtype=torch.float32)
    # Some rows at a time: what is in between takes ten times a row's levels.
    step = max(_ROUND_BYTES // (4 * max(inputs, 1)), 1)
    for start in range(0, outputs, step):
        half = weight_OI[start : start + step].half()
        scales = half.abs().amax(1).float()
        scales_O[start : start + step] = scales
        level = half * (LEVELS / scales.unsqueeze(1))
        # A row of zeros has no scale.
        levels_OI[start : start + step] = level.nan_to_num_(0).round_()
    if not torch.isfinite(scales_O).all():
        raise UnsupportedModelError(
            "this model has weights beyond 65504, the largest number of 16 bits: it cannot be "
            "held in int8; use --quant-type none"
        )
    return levels_OI, scales_O


def nbytes(outputs: int, inputs: int) -> int:
    """What such weights take."""
    return outputs * (inputs + torch.float32.itemsize)


def as_half(rows_TI: Tensor) -> Tensor:
    """In float32 what float16 can tell apart, in which bitsandbytes takes inputs to levels.

    That bfloat16 reaches further, above and below, is not minded.
    """
    if rows_TI.dtype != torch.float32:
        return rows_TI.float()
    # What has no room is an outlier, whose value is taken from the inputs.
    return rows_TI.clamp(-_MOST_HALF, _MOST_HALF).half().float()


def rows_in_levels(rows_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Return whole numbers from -127 to 127 [T, I] and what one of them is worth [T, 1].

    Nothing is an outlier here.
    """
    scales_T1 = rows_TI.abs().amax(1, keepdim=True).clamp_min_(SMALLEST)
    return (rows_TI * (LEVELS / scales_T1)).round_(), scales_T1 / LEVELS
