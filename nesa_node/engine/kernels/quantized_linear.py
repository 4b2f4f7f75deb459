"""Linear layers with int8 or nf4 weights, in the formats of bitsandbytes.

Only the weights of the blocks' linear layers and of a mixture's experts (`quantized_experts.py`)
are quantized; norms, biases and routers keep their dtype.

int8 is the format of LLM.int8(): a row of weights has 127 levels to either side and a scale, its
largest absolute value. Inputs are not quantized, unlike in LLM.int8(): `docs/decisions/008` says
why. nf4 is that of QLoRA without double quantization: two weights share a byte, 64 a scale, their
absolute maximum: 4.5 bits each. bitsandbytes' nf4 kernels run on CUDA. LLM.int8() itself, which
rounds inputs, too, is there for comparison (`LlmInt8Linear`).

On the CPU machine code computes (`native/matmul.py`): small batches read quantized
weights directly, for large ones they are dequantized first. Elsewhere torch dequantizes the whole
layer. Time for 8 million weights on one core of a Xeon with AVX-512 and AMX:

| tokens | int8 | bfloat16 | bitsandbytes |
|-|-|-|-|
| 1 | 0.7 ms | 1.2 ms | 1.9 ms |
| 8 | 1.3 | 1.5 | 2.2 |
| 16 | 2.5 | 1.6 | |
| 64 | 3.9 | 2.2 | 5.6 |
| 128 | 5.0 | 3.4 | 11 |
| 512 | 11 | 9.5 | 47 |

| tokens | nf4 | bfloat16 | bitsandbytes |
|-|-|-|-|
| 1 | 1.1 ms | 1.6 ms | 4.8 ms |
| 8 | 3.0 | 1.9 | |
| 64 | 7.4 | 3.1 | 6.9 |
| 256 | 11 | 15 | |

T tokens, I inputs, O outputs, N blocks, R rows of weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from nesa_node.core.errors import UnsupportedModelError
from nesa_node.core.settings.choices import QuantType
from nesa_node.engine.kernels.linear import DTYPE_NAMES, GEMV_MAX_TOKENS, supports_gemv
from nesa_node.engine.kernels.machine_code import (
    NativeFunction,
    allocate_in_huge_pages,
    compile_functions,
    concatenate_in_huge_pages,
)

MAX_LEVEL = 127
_QUANTIZE_CHUNK_BYTES = 8 << 20

_UNPACK_CHUNK_BYTES = 4 << 20
"""Bytes dequantized at a time, which stay in the cache. A quarter of it takes 1.2 x as long for 512
tokens."""
_ROW_MULTIPLE = 256
"""Rows per chunk are a multiple of it; other numbers take torch 1.1 to 1.4 x as long."""
_MIN_UNTRANSPOSED_TOKENS = 96
"""Tokens from which transposing the result costs more than the other order of the product."""

OUTLIER_THRESHOLD = 6.0
"""Least size of an input that LLM.int8() does not round, as its paper has it."""
_EXACT_INPUTS = 1024
"""2^24 > 1024 x 127^2"""

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


class QuantizedLinear(nn.Module, ABC):
    """Linear layer with quantized weights: `x [..., I] -> x W^T + b [..., O]`, in x's dtype."""

    _code_name: str
    """Prefix of the names of its machine-code functions."""

    def __init__(
        self,
        levels: Tensor,
        scales: Tensor,
        shape: Sequence[int],
        bias_O: nn.Parameter | None,
        dtype: torch.dtype,
    ) -> None:
        """`dtype`: inputs of this dtype use machine code. The bias may be assigned later."""
        super().__init__()
        self.out_features, self.in_features = shape
        self.levels = nn.Parameter(levels, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias: nn.Parameter | None = bias_O
        self._dtype = dtype
        self._product_scales = self._make_product_scales(scales)
        # Machine code dequantizes any rows, and multiplies whole blocks of nf4.
        self._max_few_tokens = 0 if self.in_features % BLOCK_SIZE else GEMV_MAX_TOKENS
        self._functions = self._compile_functions() if self._is_code_supported() else None

    @classmethod
    def concatenate(cls, linears: Sequence[Self]) -> Self:
        """Return one layer with the concatenated outputs of `linears`."""
        known: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
        return cls(
            concatenate_in_huge_pages([linear.levels for linear in linears]),
            torch.cat([linear.scales for linear in linears]),
            (sum(linear.out_features for linear in linears), linears[0].in_features),
            nn.Parameter(torch.cat(known), requires_grad=False) if known else None,
            linears[0]._dtype,
        )

    def select_rows(self, start: int, end: int) -> Self:
        """Return a layer of the outputs `start:end`, which shares these weights.

        Of nf4 they are whole blocks, as are the outputs of the layers that were concatenated.
        """
        levels, scales = (
            tensor[
                start * len(tensor) // self.out_features : end * len(tensor) // self.out_features
            ]
            for tensor in (self.levels, self.scales)
        )
        bias_O = None if self.bias is None else nn.Parameter(self.bias[start:end], False)
        return type(self)(levels, scales, (end - start, self.in_features), bias_O, self._dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Supports gradients of the inputs only."""
        input_TI = input.reshape(-1, self.in_features)
        tokens = len(input_TI)
        with_gradients = torch.is_grad_enabled() and input.requires_grad
        if self._functions is None or not tokens or with_gradients or input.dtype != self._dtype:
            output_TO = functional.linear(input_TI, self.dequantize(input.dtype), self.bias)
        elif tokens > self._max_few_tokens:
            output_TO = self._multiply_many(self._functions[0], input_TI)
        else:
            output_TO = self._multiply_few(self._functions[tokens], input_TI)
        return output_TO.view(*input.shape[:-1], self.out_features)

    @property
    def input_dtype(self) -> torch.dtype:
        """Dtype of the inputs that machine code multiplies."""
        return self._dtype

    @abstractmethod
    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [O, I]."""

    @abstractmethod
    def dequantize_rows(self, rows_N: Tensor) -> Tensor:
        """Return rows [N, I] of the weights, by int64 indices, in `input_dtype`.

        Of nf4 they must be whole blocks.
        """

    @abstractmethod
    def _is_code_supported(self) -> bool: ...

    @abstractmethod
    def _make_product_scales(self, scales: Tensor) -> tuple[Tensor, ...]:
        """Return the float32 tensors that products read beside the levels."""

    @abstractmethod
    def _dequantize_fields(self, start: int, weight_RI: Tensor) -> tuple[int, ...]:
        """Fields of the function that writes the rows from `start` on to `weight_RI`.

        `start` is a multiple of 256, which is whole blocks for any row length.
        """

    def _arrange_inputs(self, input_TI: Tensor) -> Tensor:
        """Inputs in float32, in the order in which products read them."""
        return input_TI.float().contiguous()

    def _multiply_few(self, product: NativeFunction, input_TI: Tensor) -> Tensor:
        """Sums in float32 and rounds once: a token's bits do not depend on the batch."""
        bias_O = _make_zeros(self.out_features) if self.bias is None else self.bias.float()
        wide_TI = self._arrange_inputs(input_TI)
        output_TO = torch.empty(len(input_TI), self.out_features, dtype=input_TI.dtype)
        product(
            self.levels.data_ptr(),
            wide_TI.data_ptr(),
            bias_O.data_ptr(),
            output_TO.data_ptr(),
            self.in_features,
            self.out_features,
            *(scales.data_ptr() for scales in self._product_scales),
            threads=torch.get_num_threads(),
        )
        return output_TO

    def _multiply_many(self, unpack: NativeFunction, input_TI: Tensor) -> Tensor:
        """Dequantize rows into a buffer that is reused, for torch's product of each chunk."""
        tokens, inputs, outputs = len(input_TI), self.in_features, self.out_features
        chunk_rows = _UNPACK_CHUNK_BYTES // (inputs * input_TI.itemsize)
        step = max(chunk_rows // _ROW_MULTIPLE, 1) * _ROW_MULTIPLE
        weight_RI = input_TI.new_empty(min(step, outputs), inputs)
        is_transposed = tokens < _MIN_UNTRANSPOSED_TOKENS
        output = input_TI.new_empty((outputs, tokens) if is_transposed else (tokens, outputs))
        output_OT = output if is_transposed else output.t()
        for start in range(0, outputs, step):
            rows_RI, output_RT = weight_RI[: outputs - start], output_OT[start : start + step]
            unpack(*self._dequantize_fields(start, rows_RI), threads=torch.get_num_threads())
            if self.bias is None:
                torch.mm(rows_RI, input_TI.t(), out=output_RT)
            else:
                bias_R1 = self.bias.detach()[start : start + step].unsqueeze(1)
                torch.addmm(bias_R1, rows_RI, input_TI.t(), out=output_RT)
        return output_OT.t().contiguous()

    def _compile_functions(self) -> list[NativeFunction] | None:
        """Return the dequantizing function, then the products of 1, 2, ... tokens."""
        if self._dtype not in DTYPE_NAMES:
            return None
        name = DTYPE_NAMES[self._dtype]
        products = [
            (f"{self._code_name}_product", name, tokens) for tokens in range(1, GEMV_MAX_TOKENS + 1)
        ]
        return compile_functions((f"{self._code_name}_unpack", name), *products)


class Int8Linear(QuantizedLinear):
    """Linear layer with int8 weights."""

    _code_name = "int8"

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        [level_sizes_O] = self._product_scales
        weight_OI = torch.empty(self.levels.shape, dtype=dtype, device=self.levels.device)
        return torch.mul(self.levels, level_sizes_O.unsqueeze(1), out=weight_OI)

    def dequantize_rows(self, rows_N: Tensor) -> Tensor:
        [level_sizes_O] = self._product_scales
        wide_NI = self.levels[rows_N] * level_sizes_O[rows_N].unsqueeze(1)
        return wide_NI.to(self._dtype)

    def _is_code_supported(self) -> bool:
        return supports_gemv(self.levels)

    def _make_product_scales(self, scales: Tensor) -> tuple[Tensor, ...]:
        return (scales / MAX_LEVEL,)

    def _dequantize_fields(self, start: int, weight_RI: Tensor) -> tuple[int, ...]:
        [level_sizes_O] = self._product_scales
        return (
            self.levels.data_ptr() + start * self.in_features,
            level_sizes_O.data_ptr() + start * level_sizes_O.itemsize,
            weight_RI.data_ptr(),
            self.in_features,
            len(weight_RI),
        )


class LlmInt8Linear(Int8Linear):
    """Linear layer of LLM.int8(): a mixed decomposition (Dettmers et al. 2022, section 3).

    A token's inputs of at least `OUTLIER_THRESHOLD` are multiplied as they are with dequantized
    weights. The remaining ones are rounded to 127 levels to either side of their largest,
    multiplied as integers, and scaled by both scales. Sums of integers are exact, everything else
    is float32, rounded once.

    The paper sets a whole feature apart for all tokens at once where one has an outlier there. Here
    each token has its own, so that what it gets does not depend on what it is batched with; of one
    token both are the same. Gradients of inputs are those of the dequantized weights, as in
    bitsandbytes.
    """

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = _RoundedInputs.apply(input, self)  # type: ignore[no-untyped-call]
        return output

    def multiply(self, input: Tensor) -> Tensor:
        """Return the product [..., O] in the dtype of `input` [..., I], without gradients."""
        [level_sizes_O] = self._product_scales
        input_TI = input.reshape(-1, self.in_features).float()
        is_outlier_TI = input_TI.abs() >= OUTLIER_THRESHOLD
        inner_TI = input_TI.masked_fill(is_outlier_TI, 0)
        scales_T1 = inner_TI.abs().amax(1, keepdim=True)
        # The level of a token without inputs is 0 / 0; what is no number stays so by its scale.
        levels_TI = (inner_TI * (MAX_LEVEL / scales_T1)).nan_to_num_(0).round_().to(torch.int8)
        output_TO = multiply_levels(levels_TI, self.levels).float()
        output_TO *= scales_T1 / MAX_LEVEL * level_sizes_O
        if len(columns := is_outlier_TI.any(0).nonzero().flatten()):
            outliers_TC = input_TI[:, columns] * is_outlier_TI[:, columns]
            weight_OC = self.levels[:, columns] * level_sizes_O.unsqueeze(1)
            output_TO += outliers_TC @ weight_OC.t()
        if self.bias is not None:
            output_TO += self.bias
        return output_TO.to(input.dtype).view(*input.shape[:-1], self.out_features)

    def _is_code_supported(self) -> bool:
        return False


class _RoundedInputs(torch.autograd.Function):
    """`LlmInt8Linear.multiply`, with the gradients of a linear layer."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: LlmInt8Linear) -> Tensor:
        ctx.layer = layer
        return layer.multiply(input)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        [grad] = grads
        weight_OI: Tensor = ctx.layer.dequantize(grad.dtype)
        return grad @ weight_OI, None


def multiply_levels(levels_TI: Tensor, levels_OI: Tensor) -> Tensor:
    """Return exact sums [T, O] of products of int8 levels, in int32 or float64."""
    cpu: Any = torch.cpu
    # Of single inputs torch 2.13 returns memory that it has not written.
    is_supported = levels_TI.device.type == "cpu" and levels_TI.shape[1] > 1
    if is_supported and cpu._is_avx512_supported():
        return torch._int_mm(levels_TI, levels_OI.t())
    # Float32 holds the sums of so many products; without AVX-512 torch's integers are slower.
    parts = zip(
        torch.split(levels_TI, _EXACT_INPUTS, 1),
        torch.split(levels_OI, _EXACT_INPUTS, 1),
        strict=True,
    )
    sums = [
        (of_tokens.float() @ of_weights.float().t()).double() for of_tokens, of_weights in parts
    ]
    return torch.stack(sums).sum(0)


class Nf4Linear(QuantizedLinear):
    """Linear layer with nf4 weights, two in each byte of `levels`."""

    _code_name = "nf4"

    def forward(self, input: Tensor) -> Tensor:
        if self.levels.device.type == "cuda":
            return self._multiply_with_bitsandbytes(input)
        return super().forward(input)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return self._unpack(self.levels, self.scales, dtype).view(-1, self.in_features)

    def dequantize_rows(self, rows_N: Tensor) -> Tensor:
        levels, scales = (
            tensor.view(self.out_features, -1)[rows_N] for tensor in (self.levels, self.scales)
        )
        return self._unpack(levels, scales.flatten(), self._dtype).view(-1, self.in_features)

    def _unpack(self, levels: Tensor, scales_N: Tensor, dtype: torch.dtype) -> Tensor:
        """Weights [N, 64] of N blocks."""
        _, codebook = self._product_scales
        halves = torch.stack((levels >> 4, levels & 15), dim=-1)
        blocks = codebook[halves.view(-1, BLOCK_SIZE).int()] * scales_N.unsqueeze(1)
        return blocks.to(dtype)

    def _is_code_supported(self) -> bool:
        return self.levels.device.type == "cpu"

    def _make_product_scales(self, scales: Tensor) -> tuple[Tensor, ...]:
        codebook = torch.tensor(CODEBOOK, dtype=torch.float32, device=scales.device)
        return scales, codebook

    def _arrange_inputs(self, input_TI: Tensor) -> Tensor:
        tokens, inputs = input_TI.shape
        wide_TI = torch.empty(tokens, inputs, dtype=torch.float32)
        halves = input_TI.reshape(tokens, inputs // 16, 2, 8)
        wide_TI.view(tokens, inputs // 16, 8, 2).copy_(halves.transpose(-1, -2))
        return wide_TI

    def _dequantize_fields(self, start: int, weight_RI: Tensor) -> tuple[int, ...]:
        scales_N, codebook = self._product_scales
        return (
            self.levels.data_ptr() + start * self.in_features // 2,
            scales_N.data_ptr() + start * self.in_features // BLOCK_SIZE * scales_N.itemsize,
            codebook.data_ptr(),
            weight_RI.data_ptr(),
            weight_RI.numel() // BLOCK_SIZE,
        )

    def _multiply_with_bitsandbytes(self, input: Tensor) -> Tensor:
        # Lazy: the import takes seconds and 120 MB, and where the package `kernels` is installed it
        # runs code from the hub.
        bitsandbytes: Any = import_module("bitsandbytes")
        scales_N, codebook = self._product_scales
        state = bitsandbytes.functional.QuantState(
            absmax=scales_N,
            shape=torch.Size((self.out_features, self.in_features)),
            code=codebook,
            blocksize=BLOCK_SIZE,
            quant_type="nf4",
            dtype=input.dtype,
        )
        packed = self.levels.unsqueeze(1)
        output: Tensor = bitsandbytes.matmul_4bit(input, packed, quant_state=state, bias=self.bias)
        return output


@cache
def _make_zeros(count: int) -> Tensor:
    """Bias of layers without one, which many experts share."""
    return torch.zeros(count, dtype=torch.float32)


def quantize_int8(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return levels [O, I] in int8 and scales [O] in float32 of weights in any floating dtype.

    Bit-identical to `bitsandbytes.functional.int8_vectorwise_quant` of the weights in float16.
    Raises `UnsupportedModelError` for weights beyond the range of float16.
    """
    outputs, inputs = weight_OI.shape
    levels_OI = allocate_in_huge_pages((outputs, inputs), torch.int8)
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


def quantize_nf4(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return packed weights [O x I / 2] and scales [N] in float32.

    The weights are whole blocks, and their rows whole bytes.

    Bit-identical to `bitsandbytes.functional.quantize_4bit`.
    """
    blocks = weight_OI.numel() // BLOCK_SIZE
    weight_NB = weight_OI.contiguous().view(blocks, BLOCK_SIZE)
    packed = allocate_in_huge_pages((blocks * BLOCK_SIZE // 2,), torch.uint8)
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


QUANTIZERS: Mapping[
    QuantType, tuple[type[QuantizedLinear], Callable[[Tensor], tuple[Tensor, Tensor]]]
] = {
    "int8": (Int8Linear, quantize_int8),
    "nf4": (Nf4Linear, quantize_nf4),
    "llm_int8": (LlmInt8Linear, quantize_int8),
}
"""Layer and quantization of weights [O, I] of each kind."""


def is_quantizable(module: nn.Module) -> bool:
    """Whether a module's weight is quantized: plain linear layers, not subclasses."""
    return type(module) in (nn.Linear, Conv1D) or type(module).__name__ == "FalconLinear"


def compute_quantized_bytes(module: nn.Module, quant_type: QuantType) -> int:
    """Return the bytes of the layer's quantized weight. Raises `UnsupportedModelError`."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    outputs, inputs = reversed(weight.shape) if isinstance(module, Conv1D) else weight.shape
    return compute_weight_bytes(outputs, inputs, quant_type)


def compute_weight_bytes(outputs: int, inputs: int, quant_type: QuantType) -> int:
    """Return the bytes of a quantized weight [O, I]. Raises `UnsupportedModelError`."""
    if quant_type in ("int8", "llm_int8"):
        return outputs * (inputs + torch.float32.itemsize)
    if outputs * inputs % BLOCK_SIZE or inputs % 2:
        raise UnsupportedModelError(
            f"nf4 holds weights in blocks of {BLOCK_SIZE}, of which a layer of {outputs} x "
            f"{inputs} has no whole number; use --quant-type int8"
        )
    return outputs * inputs // 2 + outputs * inputs // BLOCK_SIZE * torch.float32.itemsize


def make_quantized_linear(
    module: nn.Module,
    weight: Tensor,
    quant_type: QuantType,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> QuantizedLinear:
    """Return a quantized layer with this weight, and with the bias of `module`.

    Quantized on the CPU, so that every machine holds the same bytes, then moved to `device`.
    `dtype` is that of the inputs. Raises `UnsupportedModelError` for weights beyond the range of
    float16.
    """
    weight_OI = weight.t() if isinstance(module, Conv1D) else weight
    bias_O = module.bias if isinstance(module.bias, nn.Parameter) else None
    return quantize_matrix(weight_OI, quant_type, bias_O, dtype=dtype, device=device)


def quantize_matrix(
    weight_OI: Tensor,
    quant_type: QuantType,
    bias_O: nn.Parameter | None = None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> QuantizedLinear:
    """As `make_quantized_linear`, of a matrix by itself."""
    kind, quantize = QUANTIZERS[quant_type]
    levels, scales = quantize(weight_OI)
    return kind(levels.to(device), scales.to(device), weight_OI.shape, bias_O, dtype)
