"""Quantization blocks: a tensor cut along its last axis, so that no block spans two tokens.

Legend: R rows (tokens; the product of all axes but the last), D channels (values of a row), K
blocks of a row, N = R K blocks, B values of a block, C outlier channels. The last block of a row
may be shorter; it is padded with zeros.

One-byte scales of blocks are eighths of an octave below the largest value of the tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from nesa_node.compression.codec import concat_bytes, not_finite_error, read_values
from nesa_node.core.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class QuantBlocks:
    """The division of a shape into blocks of `block` values."""

    rows: int
    width: int
    block: int

    @classmethod
    def from_shape(cls, shape: Sequence[int], block: int) -> Self:
        """The blocks of `shape`; a scalar is one row of one value."""
        width = shape[-1] if shape else 1
        return cls(rows=math.prod(shape[:-1]), width=width, block=block)

    @property
    def per_row(self) -> int:
        return -(-self.width // self.block)

    @property
    def count(self) -> int:
        return self.rows * self.per_row

    @property
    def padding(self) -> int:
        return self.per_row * self.block - self.width

    def split(self, values: Tensor) -> Tensor:
        """Contiguous values of the shape as [R K, B]: a view unless padded."""
        if not self.padding:
            return values.reshape(self.count, self.block)
        values_RD = values.reshape(self.rows, self.width)
        return torch.nn.functional.pad(values_RD, (0, self.padding)).view(self.count, self.block)

    def join(self, values_NB: Tensor) -> Tensor:
        """The inverse of `split`, as [R, D]: a view."""
        return values_NB.view(self.rows, self.per_row * self.block)[:, : self.width]


CODES_PER_OCTAVE = 8
MAX_SCALE_CODE = 255
FACTOR_BITS = 15
MAX_ABS_VALUE = 2.0**100
"""Larger values are refused: sums of them, or the largest after rounding, could overflow."""


def float16_factor(values_RD: Tensor) -> float:
    """The power of two by which the largest |value| is scaled to [2^14, 2^15), for float16.

    It is at least 2^-100. Raises `ProtocolError("not_finite")`, or `ProtocolError("bad_tensor")`
    for values beyond 2^100.
    """
    ends = torch.stack(torch.aminmax(values_RD)).tolist()
    if not all(map(math.isfinite, ends)):
        raise not_finite_error()
    largest = max(map(abs, ends))
    if largest > MAX_ABS_VALUE:
        raise ProtocolError("bad_tensor", f"a value of {largest:g} is too large for the codec")
    exponent = math.frexp(largest)[1] - FACTOR_BITS if largest else 0
    return 2.0 ** max(exponent, -100)


def to_scale_codes(absmax_N1: Tensor, largest: float) -> Tensor:
    """Unrounded scale codes: 255 for `largest`, 8 less for its half. Overwrites `absmax_N1`."""
    return absmax_N1.mul_(1 / largest).log2_().mul_(CODES_PER_OCTAVE).add_(MAX_SCALE_CODE)


def decode_scales(codes_N: Tensor, unit: float) -> Tensor:
    """The scales of codes s (uint8), float32 [N]: `unit` 2^((s - 255)/8), or 0 for s = 0."""
    return _scale_table(codes_N.device).index_select(0, codes_N.int()).mul_(unit)


@functools.lru_cache(maxsize=8)
def _scale_table(device: torch.device) -> Tensor:
    """The scale of each code relative to the unit, float32 [256]."""
    values = [
        0.0,
        *(
            2.0 ** ((code - MAX_SCALE_CODE) / CODES_PER_OCTAVE)
            for code in range(1, MAX_SCALE_CODE + 1)
        ),
    ]
    return torch.tensor(values, dtype=torch.float32, device=device)


_SAMPLED_TOKENS = 64
"""Tokens sampled to find the channels with the largest mean |value|."""
_PEAK_WEIGHT = 1 / 32
"""Weight of a channel's largest |value| relative to its mean |value|."""


def largest_channels(values_RD: Tensor, count: int) -> Tensor:
    """The indices of the `count` largest channels of float32 values, int64 [C], ascending.

    These outliers are much larger than the rest for every token; within a block they would set a
    scale at which the rest is lost. Only the sender chooses: the indices are part of the payload.
    """
    if not count:
        return torch.empty(0, dtype=torch.int64, device=values_RD.device)
    size_RD = values_RD.abs()
    some_RD = size_RD[:: max(1, len(size_RD) // _SAMPLED_TOKENS)]
    score_D = some_RD.mean(0) + size_RD.amax(0) * _PEAK_WEIGHT
    return score_D.topk(count).indices.sort().values


def channel_dtype(width: int) -> torch.dtype:
    """Integer type of the channel list; 16-bit entries are read as unsigned."""
    return torch.int16 if width <= 2**16 else torch.int32


def read_channels(data: memoryview, offset: int, count: int, width: int) -> Tensor:
    """The list of `count` >= 1 channels, int64 [C], on the CPU.

    Raises `ProtocolError` unless they are ascending and below D.
    """
    channels_C = read_values(data, offset, count, channel_dtype(width)).long()
    if width <= 2**16:
        channels_C &= 0xFFFF
    first, last = channels_C[0].item(), channels_C[-1].item()
    rising = bool((channels_C[1:] > channels_C[:-1]).all())
    if not rising or first < 0 or last >= width:
        raise ProtocolError("bad_tensor", "the outlier channels are out of order or of range")
    return channels_C


def zero_channels(values_RD: Tensor, channels_C: Tensor) -> Tensor:
    """`values_RD` with `channels_C` set to zero; a copy, unless there are none."""
    return values_RD.index_fill(1, channels_C, 0) if len(channels_C) else values_RD


def split_float16(values_RC: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """The lower and the upper bytes of values / factor in float16, each uint8 [R, C].

    The lower byte takes the place of the channel's code, the upper byte is stored separately.
    """
    parts_RC2 = (values_RC / factor).half().contiguous().unsqueeze(-1).view(torch.uint8)
    return parts_RC2[..., 0], parts_RC2[..., 1]


def join_float16(lower_RC: Tensor, upper_RC: Tensor, factor: float) -> Tensor:
    """The inverse of `split_float16`, float32 [R, C]."""
    parts_RC2 = torch.stack((lower_RC, upper_RC), -1)
    return parts_RC2.view(torch.float16)[..., 0].float() * factor


@dataclass(frozen=True, slots=True)
class EightBitPayload:
    """Parts of a payload with a byte per value and `num_outliers` channels in 16 bits.

    A factor in float32 and the list of outlier channels (neither if not `has_factor`), the blocks'
    scales [N], the upper bytes of the outliers [R, C], and the codes [R, D].
    """

    blocks: QuantBlocks
    num_outliers: int
    scale_dtype: torch.dtype
    has_factor: bool

    @property
    def nbytes(self) -> int:
        blocks = self.blocks
        scales = blocks.count * self.scale_dtype.itemsize
        return self._scales_start + scales + blocks.rows * (self.num_outliers + blocks.width)

    @property
    def _scales_start(self) -> int:
        listed = self.num_outliers * channel_dtype(self.blocks.width).itemsize
        return 4 + listed if self.has_factor else 0

    def write(
        self, values_RD: Tensor, channels_C: Tensor, factor: float, scales: Tensor, codes_RD: Tensor
    ) -> memoryview:
        """The payload with a factor. Overwrites the outliers' codes."""
        codes_RD[:, channels_C], upper_RC = split_float16(values_RD[:, channels_C], factor)
        return concat_bytes(
            torch.tensor([factor], dtype=torch.float32, device=values_RD.device),
            channels_C.to(channel_dtype(self.blocks.width)),
            scales,
            upper_RC,
            codes_RD,
        )

    def factor(self, data: memoryview) -> float:
        return read_values(data, 0, 1, torch.float32).item()

    def read(self, data: memoryview, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """The scales [N], the upper bytes of the outliers [R, C], and the codes [R, D]."""
        rows, start = self.blocks.rows, self._scales_start
        scale_N = read_values(data, start, self.blocks.count, self.scale_dtype).to(device)
        start += scale_N.nbytes
        upper = read_values(data, start, rows * self.num_outliers, torch.uint8).to(device)
        start += upper.nbytes
        codes = read_values(data, start, rows * self.blocks.width, torch.uint8).to(device)
        return scale_N, upper.view(rows, self.num_outliers), codes.view(rows, self.blocks.width)

    def restore_outliers(
        self, values_RD: Tensor, data: memoryview, upper_RC: Tensor, codes_RD: Tensor
    ) -> None:
        """Overwrite the outlier channels of `values_RD` by their values."""
        if self.num_outliers:
            channels_C = read_channels(data, 4, self.num_outliers, self.blocks.width)
            channels_C = channels_C.to(values_RD.device)
            values_RD[:, channels_C] = join_float16(
                codes_RD[:, channels_C], upper_RC, self.factor(data)
            )
