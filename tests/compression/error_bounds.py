"""Upper bounds on the errors of codecs, as their docstrings state them.

Legend: R rows (tokens), D channels, C outlier channels, N blocks, B values of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nesa_node.compression.codec import DTYPES, MIN_BLOCK_ABSMAX
from nesa_node.compression.codecs import expand_codec, parse_codec
from nesa_node.compression.float_codecs import Cast
from nesa_node.compression.integer_codecs import Blockwise8, Int4, Int8, hadamard_transform
from nesa_node.compression.quantization import (
    CODES_PER_OCTAVE,
    FACTOR_BITS,
    MAX_SCALE_CODE,
    QuantBlocks,
    float16_factor,
    largest_channels,
    zero_channels,
)

_ROUNDING_ERRORS = {
    torch.float32: (2.0**-24, 2.0**-150),
    torch.float16: (2.0**-11, 2.0**-25),
    torch.bfloat16: (2.0**-8, 2.0**-134),
}


def error_bound(tensor: Tensor, *, codec: str) -> Tensor:
    """Upper bound on |decoded - value| per value of a finite tensor, float64, of its shape."""
    if not tensor.numel():
        return torch.zeros_like(tensor, dtype=torch.float64)
    tensor = tensor.detach().contiguous()
    match parse_codec(expand_codec(codec)):
        case Cast() as chosen:
            return _cast_bound(tensor, DTYPES[chosen.text])
        case Int8() as chosen:
            payload = chosen.payload(tensor.shape)
            bound = _int8_bound(tensor, payload.blocks, payload.num_outliers)
        case Blockwise8() as chosen:
            payload = chosen.payload(tensor.shape)
            bound = _blockwise8_bound(tensor, payload.blocks, payload.num_outliers)
        case Int4() as chosen:
            blocks = chosen._blocks(tensor.shape)
            bound = _int4_bound(tensor, blocks, chosen._num_outliers(blocks))
        case _:
            return torch.zeros_like(tensor, dtype=torch.float64)
    return _with_rounding(tensor, bound.reshape(tensor.shape))


def _with_rounding(tensor: Tensor, bound: Tensor) -> Tensor:
    """`bound` plus half a unit in the last place of a decoded value, in the tensor's dtype."""
    relative, smallest = _ROUNDING_ERRORS[tensor.dtype]
    return bound + (tensor.double().abs() + bound) * relative + smallest


def _cast_bound(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    zero = torch.zeros_like(tensor, dtype=torch.float64)
    if tensor.dtype == dtype:
        return zero
    return _with_rounding(tensor, _with_rounding(tensor.to(dtype), zero))


def _int8_bound(tensor: Tensor, blocks: QuantBlocks, num_outliers: int) -> Tensor:
    values_RD, channels_C = _outliers(tensor, blocks, num_outliers)
    values_NB = blocks.split(zero_channels(values_RD, channels_C)).double()
    least = float16_factor(values_RD) * 2.0 ** (
        FACTOR_BITS + (1 - MAX_SCALE_CODE) / CODES_PER_OCTAVE
    )
    most_N1 = values_NB.abs().amax(-1, keepdim=True) * 2 ** (1 / CODES_PER_OCTAVE)
    bound_N1 = most_N1.clamp_(min=least) / (2 * 127) * (1 + 2.0**-12)
    return _of_values(bound_N1, values_RD, channels_C, blocks)


def _blockwise8_bound(tensor: Tensor, blocks: QuantBlocks, num_outliers: int) -> Tensor:
    values_RD, channels_C = _outliers(tensor, blocks, num_outliers)
    values_NB = blocks.split(zero_channels(values_RD, channels_C)).double()
    relative = (0.9 / 128 + 2.0**-14) * (1 + 2.0**-12)
    bound_N1 = values_NB.abs().amax(-1, keepdim=True) * relative + MIN_BLOCK_ABSMAX
    return _of_values(bound_N1, values_RD, channels_C, blocks)


def _int4_bound(tensor: Tensor, blocks: QuantBlocks, num_outliers: int) -> Tensor:
    values_RD, channels_C = _outliers(tensor, blocks, num_outliers)
    rotated_NB = hadamard_transform(blocks.split(zero_channels(values_RD, channels_C)))
    absmax_N1 = (rotated_NB / blocks.block).double().abs().amax(-1, keepdim=True)
    each_N1 = absmax_N1 * 0.036 + float16_factor(values_RD) * 2.0 ** (FACTOR_BITS - 31)
    return _of_values(each_N1 * blocks.block, values_RD, channels_C, blocks)


def _outliers(tensor: Tensor, blocks: QuantBlocks, count: int) -> tuple[Tensor, Tensor]:
    values_RD = tensor.reshape(blocks.rows, blocks.width).float()
    return values_RD, largest_channels(values_RD, count)


def _of_values(
    bound_N1: Tensor, values_RD: Tensor, channels_C: Tensor, blocks: QuantBlocks
) -> Tensor:
    """The bound of each value, where outliers have that of value / factor in float16."""
    bound_RD = blocks.join(bound_N1.expand(-1, blocks.block).contiguous()).clone()
    if len(channels_C):
        factor = float16_factor(values_RD)
        values_RC = values_RD[:, channels_C].double()
        bound_RD[:, channels_C] = values_RC.abs() * 2.0**-11 + factor * 2.0**-25
    return bound_RD
