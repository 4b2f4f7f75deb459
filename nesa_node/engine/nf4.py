"""Linear layers with nf4 weights, in bitsandbytes' format without double quantization.

Two weights share a byte, 64 an absolute maximum (`peaks`): 4.5 bits each. bitsandbytes' kernels run
on CUDA. On CPUs with 512-bit registers machine code computes (`native/nf4.py`): small batches read
nf4 weights directly, for large ones they are dequantized first. Time for 8 million weights on one
core:

| tokens | ours | bfloat16 | bitsandbytes |
|-|-|-|-|
| 1 | 1.1 ms | 1.6 ms | 4.8 ms |
| 8 | 3.0 | 1.9 | |
| 64 | 7.4 | 3.1 | 6.9 |
| 256 | 11 | 15 | |

Elsewhere torch gathers each weight from the codebook, which is slow. T tokens, I inputs, O outputs,
N blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nesa_node.engine import huge_pages
from nesa_node.engine.gemv import MOST_TOKENS, NAMES
from nesa_node.engine.machine_code import Function, compiled
from nesa_node.engine.unpacked import product_by_rows

BLOCK = 64
_SMALLEST = 1e-38
_ROUND_BLOCKS = 1 << 14
NUMBERS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Codebook of nf4: quantiles of the normal distribution at 16 equal shares (QLoRA, appendix E)."""


class Nf4Linear(nn.Module):
    """Linear layer with nf4 weights: `x [..., I] -> x W^T + b [..., O]`, in the dtype of `x`."""

    def __init__(
        self,
        packed: Tensor,
        peaks_N: Tensor,
        shape: Sequence[int],
        bias_O: nn.Parameter | None,
        dtype: torch.dtype,
    ) -> None:
        """`dtype`: inputs of this dtype use machine code. The bias may be assigned later."""
        super().__init__()
        self.out_features, self.in_features = shape
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.peaks = nn.Parameter(peaks_N, requires_grad=False)
        self.bias: nn.Parameter | None = bias_O
        self._dtype = dtype
        self._zeros_O = torch.zeros(self.out_features, dtype=torch.float32)
        self._numbers = torch.tensor(NUMBERS, dtype=torch.float32, device=packed.device)
        self._code = _machine_code(dtype) if packed.device.type == "cpu" else None

    @classmethod
    def joined(cls, linears: Sequence[Nf4Linear]) -> Nf4Linear:
        """Return one layer with the concatenated outputs of `linears`."""
        known: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        return cls(
            huge_pages.joined([linear.packed for linear in linears]),
            torch.cat([linear.peaks for linear in linears]),
            (sum(linear.out_features for linear in linears), linears[0].in_features),
            nn.Parameter(torch.cat(known), requires_grad=False) if known else None,
            linears[0]._dtype,
        )

    def forward(self, input: Tensor) -> Tensor:
        """Supports gradients of the inputs only."""
        if self.packed.device.type == "cuda":
            return self._bitsandbytes(input)
        if torch.is_grad_enabled() and input.requires_grad:
            return functional.linear(input, self.dequantized(input.dtype), self.bias)
        input_TI = input.reshape(-1, self.in_features)
        tokens = len(input_TI)
        if self._code is None or not tokens or input.dtype != self._dtype:
            output_TO = functional.linear(input_TI, self.dequantized(input.dtype), self.bias)
        elif tokens > MOST_TOKENS or self.in_features % BLOCK:
            output_TO = self._of_many(self._code[0], input_TI)
        else:
            output_TO = self._of_few(self._code[tokens], input_TI)
        return output_TO.view(*input.shape[:-1], self.out_features)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [O, I]."""
        halves = torch.stack((self.packed >> 4, self.packed & 15), dim=-1)
        blocks = self._numbers[halves.view(-1, BLOCK).int()] * self.peaks.unsqueeze(1)
        return blocks.to(dtype).view(self.out_features, self.in_features)

    def _of_few(self, product: Function, input_TI: Tensor) -> Tensor:
        bias_O = self._zeros_O if self.bias is None else self.bias.float()
        wide_TI = input_TI.float().contiguous()
        output_TO = torch.empty(len(input_TI), self.out_features, dtype=input_TI.dtype)
        product(
            self.packed.data_ptr(),
            self.peaks.data_ptr(),
            self._numbers.data_ptr(),
            wide_TI.data_ptr(),
            bias_O.data_ptr(),
            output_TO.data_ptr(),
            self.in_features,
            self.out_features,
            threads=torch.get_num_threads(),
        )
        return output_TO

    def _of_many(self, unpack: Function, input_TI: Tensor) -> Tensor:
        inputs = self.in_features

        # `start` is a multiple of 256 rows, which is whole blocks for any row length.
        def unpacked(start: int, weight_RI: Tensor) -> None:
            unpack(
                self.packed.data_ptr() + start * inputs // 2,
                self.peaks.data_ptr() + start * inputs // BLOCK * self.peaks.itemsize,
                self._numbers.data_ptr(),
                weight_RI.data_ptr(),
                weight_RI.numel() // BLOCK,
                threads=torch.get_num_threads(),
            )

        return product_by_rows(input_TI, self.out_features, self.bias, unpacked)

    def _bitsandbytes(self, input: Tensor) -> Tensor:
        # Lazy: the import takes seconds and 120 MB, and where the package `kernels` is installed it
        # runs code from the hub.
        bitsandbytes: Any = import_module("bitsandbytes")
        state = bitsandbytes.functional.QuantState(
            absmax=self.peaks,
            shape=torch.Size((self.out_features, self.in_features)),
            code=self._numbers,
            blocksize=BLOCK,
            quant_type="nf4",
            dtype=input.dtype,
        )
        packed = self.packed.unsqueeze(1)
        output: Tensor = bitsandbytes.matmul_4bit(input, packed, quant_state=state, bias=self.bias)
        return output


def quantized(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return packed weights [O x I / 2] and peaks [N] in float32 of weights that `fits`.

    Bit-identical to `bitsandbytes.functional.quantize_4bit`.
    """
    blocks = weight_OI.numel() // BLOCK
    weight_NB = weight_OI.contiguous().view(blocks, BLOCK)
    packed = huge_pages.empty((blocks * BLOCK // 2,), torch.uint8)
    peaks_N = torch.empty(blocks, dtype=torch.float32)
    numbers = torch.tensor(NUMBERS, dtype=torch.float32)
    between = (numbers[:-1] + numbers[1:]) / 2
    packed_NB = packed.view(blocks, BLOCK // 2)
    # In chunks of blocks: intermediates take many times the memory of the result.
    for start in range(0, blocks, _ROUND_BLOCKS):
        end = start + _ROUND_BLOCKS
        wide = weight_NB[start:end].float()
        peaks = wide.abs().amax(1)
        peaks_N[start:end] = peaks
        scaled = wide * (1 / peaks.clamp_min(_SMALLEST)).unsqueeze(1)
        indices = torch.bucketize(scaled.clamp_(-1, 1), between, out_int32=True).to(torch.uint8)
        packed_NB[start:end] = indices[:, ::2] << 4 | indices[:, 1::2]
    return packed, peaks_N


def fits(outputs: int, inputs: int) -> bool:
    """Whether the weight has whole blocks, and its rows whole bytes."""
    return outputs * inputs % BLOCK == 0 and inputs % 2 == 0


def nbytes(outputs: int, inputs: int) -> int:
    """Return the bytes of a quantized weight."""
    return outputs * inputs // 2 + outputs * inputs // BLOCK * torch.float32.itemsize


def _machine_code(dtype: torch.dtype) -> list[Function] | None:
    """Return the dequantizing function, then the products of 1, 2, ... `MOST_TOKENS` tokens."""
    if dtype not in NAMES:
        return None
    name = NAMES[dtype]
    products = [("nf4_product", name, tokens) for tokens in range(1, MOST_TOKENS + 1)]
    return compiled(("nf4_unpack", name), *products)
