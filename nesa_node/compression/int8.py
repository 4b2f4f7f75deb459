"""Codec `int8`: integers from -127 to 127 with a scale per 16 values, outliers in 16 bits.

A few channels of a language model's hidden states are hundreds of times larger than the rest. In
eight bits they would cause more error than all the rest, so that they get 16 bits; one-byte scales
of small blocks take no more space than float32 scales of large ones (`docs/decisions/016`).

Legend: R rows (tokens), D channels, C outlier channels, K blocks of a row, N = R K blocks,
B values of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nesa_node.compression.codec import DTYPES, TensorLayout, round_to_dtype
from nesa_node.compression.quantization import (
    FACTOR_BITS,
    MAX_SCALE_CODE,
    EightBitPayload,
    QuantBlocks,
    decode_scales,
    float16_factor,
    largest_channels,
    to_scale_codes,
    zero_channels,
)

_MAX_LEVEL = 127


@dataclass(frozen=True, slots=True)
class Int8:
    """value = signed integer * scale; the scale is the block's largest |value| / 127.

    Scales are rounded up to an eighth of an octave. `outliers`: outlier channels in rows of at
    least 16 times as many channels; shorter rows have none. Payload: a factor in float32, a power
    of two; the ascending list of the C outlier channels, 2 bytes each (4 if D > 65,536); a byte for
    each block's scale [N]; the upper bytes of the outliers / factor in float16 [R, C]; a byte per
    value [R, D]: its integer, or the lower byte of an outlier.

    Errors are at most |value| 2^-11 + factor 2^-25 for outliers, and half a step for other values.
    A step is at most 2^(1/8) / 127 of the block's largest |value|, or that of scale code 1:
    2^-31.75 / 127 of the tensor's largest, rounded up to a power of two.
    """

    block: int = 16
    outliers: int = 8

    @property
    def text(self) -> str:
        return f"int8@2:{self.block}:{self.outliers}"

    def nbytes(self, meta: TensorLayout) -> int:
        return self.payload(meta.shape).nbytes

    def encode(self, tensor: Tensor) -> memoryview:
        payload = self.payload(tensor.shape)
        blocks = payload.blocks
        values_RD = tensor.view(blocks.rows, blocks.width).float()
        factor = float16_factor(values_RD)
        channels_C = largest_channels(values_RD, payload.num_outliers)
        values_NB = blocks.split(zero_channels(values_RD, channels_C))
        scale_N1 = _scale_codes(values_NB, factor)
        each_N = decode_scales(scale_N1.view(-1), _max_scale(factor)).reciprocal_()
        codes_NB = (values_NB * each_N.view(-1, 1)).round_().to(torch.int8)
        codes_RD = blocks.join(codes_NB).contiguous().view(torch.uint8)
        return payload.write(values_RD, channels_C, factor, scale_N1, codes_RD)

    def decode(self, meta: TensorLayout, data: memoryview, device: torch.device) -> Tensor:
        payload = self.payload(meta.shape)
        blocks = payload.blocks
        scale_N, upper_RC, codes_RD = payload.read(data, device)
        real_N1 = decode_scales(scale_N, _max_scale(payload.factor(data))).view(-1, 1)
        values_RD = blocks.join(blocks.split(codes_RD.view(torch.int8)) * real_N1)
        payload.restore_outliers(values_RD, data, upper_RC, codes_RD)
        return round_to_dtype(values_RD.reshape(meta.shape), DTYPES[meta.dtype])

    def payload(self, shape: torch.Size | tuple[int, ...]) -> EightBitPayload:
        """The payload of `shape`; rows shorter than a block are one short block without padding."""
        blocks = QuantBlocks.from_shape(shape, min(self.block, shape[-1] if shape else 1))
        count = self.outliers if blocks.width >= 16 * self.outliers else 0
        return EightBitPayload(blocks, count, torch.uint8, has_factor=True)


def _max_scale(factor: float) -> float:
    """The scale that code 255 stands for."""
    return factor * 2.0**FACTOR_BITS / _MAX_LEVEL


def _scale_codes(values_NB: Tensor, factor: float) -> Tensor:
    """The scale codes, uint8 [N, 1], at least 1; rounded up, so that no integer exceeds 127."""
    most_N1 = values_NB.abs().amax(-1, keepdim=True)
    codes_N1 = to_scale_codes(most_N1, factor * 2.0**FACTOR_BITS).ceil_()
    return codes_N1.clamp_(1, MAX_SCALE_CODE).to(torch.uint8)
