"""Linear layers with nf4 weights, in bitsandbytes' format without double quantization.

Two weights share a byte, 64 an absolute maximum (`absmax`): 4.5 bits each. bitsandbytes' kernels
run on CUDA. On CPUs with 512-bit registers machine code computes (`native/nf4.py`): small batches
read nf4 weights directly, for large ones they are dequantized first. Time for 8 million weights on
one core:

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

from nesa_node.engine.kernels import huge_pages
from nesa_node.engine.kernels.machine_code import NativeFunction, compile_functions
from nesa_node.engine.kernels.matmul import DTYPE_NAMES, GEMV_MAX_TOKENS, multiply_by_row_chunks

BLOCK_SIZE = 64
_MIN_ABSMAX = 1e-38
_QUANTIZE_CHUNK_BLOCKS = 1 << 14
CODEBOOK = (
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
        absmax_N: Tensor,
        shape: Sequence[int],
        bias_O: nn.Parameter | None,
        dtype: torch.dtype,
    ) -> None:
        """`dtype`: inputs of this dtype use machine code. The bias may be assigned later."""
        super().__init__()
        self.out_features, self.in_features = shape
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.absmax = nn.Parameter(absmax_N, requires_grad=False)
        self.bias: nn.Parameter | None = bias_O
        self._dtype = dtype
        self._zeros_O = torch.zeros(self.out_features, dtype=torch.float32)
        self._codebook = torch.tensor(CODEBOOK, dtype=torch.float32, device=packed.device)
        self._functions = _compile_functions(dtype) if packed.device.type == "cpu" else None

    @classmethod
    def concatenate(cls, linears: Sequence[Nf4Linear]) -> Nf4Linear:
        """Return one layer with the concatenated outputs of `linears`."""
        known: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        return cls(
            huge_pages.concatenate([linear.packed for linear in linears]),
            torch.cat([linear.absmax for linear in linears]),
            (sum(linear.out_features for linear in linears), linears[0].in_features),
            nn.Parameter(torch.cat(known), requires_grad=False) if known else None,
            linears[0]._dtype,
        )

    def forward(self, input: Tensor) -> Tensor:
        """Supports gradients of the inputs only."""
        if self.packed.device.type == "cuda":
            return self._multiply_with_bitsandbytes(input)
        if torch.is_grad_enabled() and input.requires_grad:
            return functional.linear(input, self.dequantize(input.dtype), self.bias)
        input_TI = input.reshape(-1, self.in_features)
        tokens = len(input_TI)
        if self._functions is None or not tokens or input.dtype != self._dtype:
            output_TO = functional.linear(input_TI, self.dequantize(input.dtype), self.bias)
        elif tokens > GEMV_MAX_TOKENS or self.in_features % BLOCK_SIZE:
            output_TO = self._multiply_many(self._functions[0], input_TI)
        else:
            output_TO = self._multiply_few(self._functions[tokens], input_TI)
        return output_TO.view(*input.shape[:-1], self.out_features)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [O, I]."""
        halves = torch.stack((self.packed >> 4, self.packed & 15), dim=-1)
        blocks = self._codebook[halves.view(-1, BLOCK_SIZE).int()] * self.absmax.unsqueeze(1)
        return blocks.to(dtype).view(self.out_features, self.in_features)

    def _multiply_few(self, product: NativeFunction, input_TI: Tensor) -> Tensor:
        bias_O = self._zeros_O if self.bias is None else self.bias.float()
        wide_TI = input_TI.float().contiguous()
        output_TO = torch.empty(len(input_TI), self.out_features, dtype=input_TI.dtype)
        product(
            self.packed.data_ptr(),
            self.absmax.data_ptr(),
            self._codebook.data_ptr(),
            wide_TI.data_ptr(),
            bias_O.data_ptr(),
            output_TO.data_ptr(),
            self.in_features,
            self.out_features,
            threads=torch.get_num_threads(),
        )
        return output_TO

    def _multiply_many(self, unpack: NativeFunction, input_TI: Tensor) -> Tensor:
        inputs = self.in_features

        # `start` is a multiple of 256 rows, which is whole blocks for any row length.
        def unpacked(start: int, weight_RI: Tensor) -> None:
            unpack(
                self.packed.data_ptr() + start * inputs // 2,
                self.absmax.data_ptr() + start * inputs // BLOCK_SIZE * self.absmax.itemsize,
                self._codebook.data_ptr(),
                weight_RI.data_ptr(),
                weight_RI.numel() // BLOCK_SIZE,
                threads=torch.get_num_threads(),
            )

        return multiply_by_row_chunks(input_TI, self.out_features, self.bias, unpacked)

    def _multiply_with_bitsandbytes(self, input: Tensor) -> Tensor:
        # Lazy: the import takes seconds and 120 MB, and where the package `kernels` is installed it
        # runs code from the hub.
        bitsandbytes: Any = import_module("bitsandbytes")
        state = bitsandbytes.functional.QuantState(
            absmax=self.absmax,
            shape=torch.Size((self.out_features, self.in_features)),
            code=self._codebook,
            blocksize=BLOCK_SIZE,
            quant_type="nf4",
            dtype=input.dtype,
        )
        packed = self.packed.unsqueeze(1)
        output: Tensor = bitsandbytes.matmul_4bit(input, packed, quant_state=state, bias=self.bias)
        return output


def quantize(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return packed weights [O x I / 2] and peaks [N] in float32 of weights that
    `is_quantizable_shape`.

    Bit-identical to `bitsandbytes.functional.quantize_4bit`.
    """
    blocks = weight_OI.numel() // BLOCK_SIZE
    weight_NB = weight_OI.contiguous().view(blocks, BLOCK_SIZE)
    packed = huge_pages.empty((blocks * BLOCK_SIZE // 2,), torch.uint8)
    peaks_N = torch.empty(blocks, dtype=torch.float32)
    numbers = torch.tensor(CODEBOOK, dtype=torch.float32)
    between = (numbers[:-1] + numbers[1:]) / 2
    packed_NB = packed.view(blocks, BLOCK_SIZE // 2)
    # In chunks of blocks: intermediates take many times the memory of the result.
    for start in range(0, blocks, _QUANTIZE_CHUNK_BLOCKS):
        end = start + _QUANTIZE_CHUNK_BLOCKS
        wide = weight_NB[start:end].float()
        peaks = wide.abs().amax(1)
        peaks_N[start:end] = peaks
        scaled = wide * (1 / peaks.clamp_min(_MIN_ABSMAX)).unsqueeze(1)
        indices = torch.bucketize(scaled.clamp_(-1, 1), between, out_int32=True).to(torch.uint8)
        packed_NB[start:end] = indices[:, ::2] << 4 | indices[:, 1::2]
    return packed, peaks_N


def is_quantizable_shape(outputs: int, inputs: int) -> bool:
    """Whether the weight has whole blocks, and its rows whole bytes."""
    return outputs * inputs % BLOCK_SIZE == 0 and inputs % 2 == 0


def compute_nbytes(outputs: int, inputs: int) -> int:
    """Return the bytes of a quantized weight."""
    return outputs * inputs // 2 + outputs * inputs // BLOCK_SIZE * torch.float32.itemsize


def _compile_functions(dtype: torch.dtype) -> list[NativeFunction] | None:
    """Return the dequantizing function, then the products of 1, 2, ... `MOST_TOKENS` tokens."""
    if dtype not in DTYPE_NAMES:
        return None
    name = DTYPE_NAMES[dtype]
    products = [("nf4_product", name, tokens) for tokens in range(1, GEMV_MAX_TOKENS + 1)]
    return compile_functions(("nf4_unpack", name), *products)
