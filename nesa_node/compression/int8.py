"""Codec `int8`: integers from -127 to 127 with a scale per 16 values, outliers in 16 bits.

A few channels of a language model's hidden states are hundreds of times larger than the rest. In
eight bits they would cause more error than all the rest, so that they get 16 bits; one-byte scales
of small blocks take no more space than float32 scales of large ones (`docs/decisions/016`).

Legend: R rows (tokens), D channels, C outlier channels, K blocks of a row, N = R K blocks,
B values of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nesa_node.compression.codec import (
    DTYPES,
    TensorLayout,
    add_rounding_bound,
    concat_bytes,
    read_values,
    round_to_dtype,
)
from nesa_node.compression.quantization import (
    CODES_PER_OCTAVE,
    FACTOR_BITS,
    MAX_SCALE_CODE,
    QuantBlocks,
    channel_dtype,
    decode_scales,
    float16_bound,
    float16_factor,
    join_float16,
    largest_channels,
    read_channels,
    split_float16,
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
    """

    block: int = 16
    outliers: int = 8
    exact: ClassVar[bool] = False

    @property
    def text(self) -> str:
        return f"int8@2:{self.block}:{self.outliers}"

    def nbytes(self, meta: TensorLayout) -> int:
        blocks = self._blocks(meta.shape)
        count = self._num_outliers(blocks)
        listed = count * channel_dtype(blocks.width).itemsize
        return 4 + listed + blocks.count + blocks.rows * (count + blocks.width)

    def encode(self, tensor: Tensor) -> memoryview:
        blocks = self._blocks(tensor.shape)
        values_RD = tensor.view(blocks.rows, blocks.width).float()
        factor = float16_factor(values_RD)
        channels_C = largest_channels(values_RD, self._num_outliers(blocks))
        values_NB = blocks.split(zero_channels(values_RD, channels_C))
        scale_N1 = _scale_codes(values_NB, factor)
        each_N = decode_scales(scale_N1.view(-1), _max_scale(factor)).reciprocal_()
        codes_NB = (values_NB * each_N.view(-1, 1)).round_().to(torch.int8)
        codes_RD = blocks.join(codes_NB).contiguous().view(torch.uint8)
        codes_RD[:, channels_C], upper_RC = split_float16(values_RD[:, channels_C], factor)
        return concat_bytes(
            torch.tensor([factor], dtype=torch.float32, device=tensor.device),
            channels_C.to(channel_dtype(blocks.width)),
            scale_N1,
            upper_RC,
            codes_RD,
        )

    def decode(self, meta: TensorLayout, data: memoryview, device: torch.device) -> Tensor:
        blocks = self._blocks(meta.shape)
        count = self._num_outliers(blocks)
        factor = read_values(data, 0, 1, torch.float32).item()
        start = 4 + count * channel_dtype(blocks.width).itemsize
        scale_N = read_values(data, start, blocks.count, torch.uint8).to(device)
        start += blocks.count
        upper = read_values(data, start, blocks.rows * count, torch.uint8).to(device)
        start += upper.nbytes
        codes = read_values(data, start, blocks.rows * blocks.width, torch.uint8).to(device)
        real_N1 = decode_scales(scale_N, _max_scale(factor)).view(-1, 1)
        values_RD = blocks.join(blocks.split(codes.view(torch.int8)) * real_N1)
        if count:
            channels_C = read_channels(data, 4, count, blocks.width).to(device)
            lower_RC = codes.view(blocks.rows, blocks.width)[:, channels_C]
            upper_RC = upper.view(blocks.rows, count)
            values_RD[:, channels_C] = join_float16(lower_RC, upper_RC, factor)
        return round_to_dtype(values_RD.reshape(meta.shape), DTYPES[meta.dtype])

    def error_bound(self, tensor: Tensor) -> Tensor:
        """Outliers: |value| 2^-11 + factor 2^-25. Rest: half a step, as no code exceeds 127.

        A step is at most 2^(1/8) / 127 of the block's largest |value|, or that of scale code 1:
        2^-31.75 / 127 of the tensor's largest, rounded up to a power of two.
        """
        blocks = self._blocks(tensor.shape)
        values_RD = tensor.reshape(blocks.rows, blocks.width).float()
        factor = float16_factor(values_RD)
        channels_C = largest_channels(values_RD, self._num_outliers(blocks))
        values_NB = blocks.split(zero_channels(values_RD, channels_C)).double()
        least = factor * 2.0 ** (FACTOR_BITS + (1 - MAX_SCALE_CODE) / CODES_PER_OCTAVE)
        most_N1 = (values_NB.abs().amax(-1, keepdim=True) * 2 ** (1 / CODES_PER_OCTAVE)).clamp_(
            min=least
        )
        bound_N1 = most_N1 / (2 * _MAX_LEVEL) * (1 + 2.0**-12)
        bound_RD = blocks.join(bound_N1.expand(-1, blocks.block).contiguous()).clone()
        bound_RD[:, channels_C] = float16_bound(values_RD[:, channels_C], factor)
        return add_rounding_bound(tensor, bound_RD.reshape(tensor.shape))

    def _blocks(self, shape: torch.Size | tuple[int, ...]) -> QuantBlocks:
        """The blocks of `shape`; rows shorter than a block are one short block without padding."""
        return QuantBlocks.from_shape(shape, min(self.block, shape[-1] if shape else 1))

    def _num_outliers(self, blocks: QuantBlocks) -> int:
        return self.outliers if blocks.width >= 16 * self.outliers else 0


def _max_scale(factor: float) -> float:
    """The scale that code 255 stands for."""
    return factor * 2.0**FACTOR_BITS / _MAX_LEVEL


def _scale_codes(values_NB: Tensor, factor: float) -> Tensor:
    """The scale codes, uint8 [N, 1], at least 1; rounded up, so that no integer exceeds 127."""
    most_N1 = values_NB.abs().amax(-1, keepdim=True)
    codes_N1 = to_scale_codes(most_N1, factor * 2.0**FACTOR_BITS).ceil_()
    return codes_N1.clamp_(1, MAX_SCALE_CODE).to(torch.uint8)
