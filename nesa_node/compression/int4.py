"""`int4`: four bits per value after a rotation of each block, outlier channels kept in 16 bits.

A few channels of a language model's hidden states are hundreds of times larger than the others,
for all tokens: they are sent apart. What is left of each block is rotated, which makes it nearly
Gaussian whatever it was (as in QuaRot, arXiv 2404.00456), and rounded to 16 levels that suit that.

Legend: R rows, D channels, K blocks of a row, N = R K blocks, B values of a block, C kept channels.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from nesa_node.compression.blocks import Blocks
from nesa_node.compression.codec import (
    DTYPES,
    part_of,
    payload_of,
    require_finite,
    round_to,
    rounded_bound,
)
from nesa_node.compression.hadamard import hadamard
from nesa_node.compression.outliers import largest_channels, list_dtype, read_list
from nesa_node.core.errors import ProtocolError

if TYPE_CHECKING:
    from nesa_node.compression.tensors import TensorMeta

_POSITIVE = (15, 41, 71, 101, 131, 169, 207, 253)
"""In 256ths of a block's scale: near the best 16 levels for 8 Gaussian numbers (Lloyd-Max).

Halfway between neighbours lie multiples of 2/256, so that a table of 256 entries finds the nearest.
"""
_WORST = 23 / 256
"""Half the largest distance of two neighbours."""
_OCTAVE = 8
_AWAY = (0, 1, -1, 2, -2)
_LAST = 255
_FACTOR_BITS = 15
LARGEST = 2.0**100
"""Larger values are refused: sums of them would overflow."""


@dataclass(frozen=True, slots=True)
class Int4:
    """One of every `share` channels is kept, those that are largest; 0: none.

    Payload: a factor in float32, a power of two; the list of the C channels, rising, of 2 bytes each
    (4 if D > 65,536); their values / factor [R, C] in float16; a byte for each block's scale [N]; the
    codes [N, B], two in a byte, the first in the low bits.
    """

    block: int = 8
    share: int = 64
    exact: ClassVar[bool] = False

    @property
    def text(self) -> str:
        return f"int4:{self.block}:{self.share}"

    def nbytes(self, meta: TensorMeta) -> int:
        blocks = self._blocks(meta.shape)
        return self._scales_start(blocks) + blocks.count + -(-blocks.count * blocks.block // 2)

    def encode(self, tensor: Tensor) -> memoryview:
        blocks = self._blocks(tensor.shape)
        values_RD = tensor.view(blocks.rows, blocks.width).float()
        factor = _factor(values_RD)
        channels_C = largest_channels(values_RD, self._count(blocks))
        rotated_NB = _rotated(blocks, values_RD, channels_C)
        top = factor * 2.0**_FACTOR_BITS
        scale_N1 = _scale_codes(rotated_NB, top)
        codes = _nearest(tensor.device).index_select(0, _steps(rotated_NB, scale_N1, top))
        if codes.numel() % 2:
            codes = torch.nn.functional.pad(codes, (0, 1))
        return payload_of(
            torch.tensor([factor], dtype=torch.float32, device=tensor.device),
            channels_C.to(list_dtype(blocks.width)),
            (values_RD[:, channels_C] / factor).half(),
            scale_N1,
            codes[0::2] + (codes[1::2] << 4),
        )

    def decode(self, meta: TensorMeta, data: memoryview, device: torch.device) -> Tensor:
        blocks = self._blocks(meta.shape)
        factor = part_of(data, 0, 1, torch.float32).item()
        start = self._scales_start(blocks)
        scale_N = part_of(data, start, blocks.count, torch.uint8).to(device)
        real_N = _scales(device).index_select(0, scale_N.int()) * (factor * 2.0**_FACTOR_BITS)
        start += blocks.count
        packed = part_of(data, start, data.nbytes - start, torch.uint8).to(device)
        levels = _pairs(device).index_select(0, packed.int()).view(-1)
        levels_NB = levels[: blocks.count * blocks.block].view(blocks.count, blocks.block)
        values_RD = blocks.join(hadamard(levels_NB * real_N.view(-1, 1)))
        if count := self._count(blocks):
            channels_C = read_list(data, 4, count, blocks.width).to(device)
            start = 4 + count * list_dtype(blocks.width).itemsize
            kept = part_of(data, start, blocks.rows * count, torch.float16).to(device)
            values_RD[:, channels_C] = kept.float().view(blocks.rows, count) * factor
        return round_to(values_RD.reshape(meta.shape), DTYPES[meta.dtype])

    def error_bound(self, tensor: Tensor) -> Tensor:
        """Kept: |value| 2^-11 + factor 2^-25. Others: B times 0.094 of their block's largest rotated.

        Each of the B rotated values that a value is the sum of is off by 23/256 of a scale, which is
        at most 2^(1/16) of the largest of them; and all of it, where that is below 2^-30 of the
        tensor's largest |value|. Another scale is taken only if the sum of squares is less, which
        keeps sums of B below that too. Typical errors are a tenth of it: they cancel.
        """
        blocks = self._blocks(tensor.shape)
        values_RD = tensor.reshape(blocks.rows, blocks.width).float()
        factor = _factor(values_RD)
        channels_C = largest_channels(values_RD, self._count(blocks))
        absmax_N1 = _rotated(blocks, values_RD, channels_C).double().abs().amax(-1, keepdim=True)
        lost = factor * 2.0 ** (_FACTOR_BITS - 31)
        each_N1 = absmax_N1 * (_WORST * 2 ** (1 / 16) * (1 + 2.0**-8)) + lost
        bound_NB = (each_N1 * blocks.block).expand(-1, blocks.block).contiguous()
        bound_RD = blocks.join(bound_NB).clone()
        kept_RC = values_RD[:, channels_C].double().abs()
        bound_RD[:, channels_C] = kept_RC * 2.0**-11 + factor * 2.0**-25
        return rounded_bound(tensor, bound_RD.reshape(tensor.shape))

    def _blocks(self, shape: torch.Size | tuple[int, ...]) -> Blocks:
        """Rows shorter than a block are one block of the next power of two."""
        width = shape[-1] if shape else 1
        return Blocks.of(shape, min(self.block, 1 << (width - 1).bit_length()))

    def _count(self, blocks: Blocks) -> int:
        return blocks.width // self.share if self.share else 0

    def _scales_start(self, blocks: Blocks) -> int:
        each = list_dtype(blocks.width).itemsize + 2 * blocks.rows
        return 4 + self._count(blocks) * each


def _factor(values_RD: Tensor) -> float:
    """A power of two: divided by it, the largest |value| lies in [2^14, 2^15), for float16.

    Raises `ProtocolError`: "not_finite", or "bad_tensor" for values beyond `LARGEST`.
    """
    ends = torch.stack(torch.aminmax(values_RD)).tolist()
    if not all(map(math.isfinite, ends)):
        raise ProtocolError("not_finite", "the tensor holds NaN or infinite values")
    largest = max(map(abs, ends))
    if largest > LARGEST:
        raise ProtocolError("bad_tensor", f"a value of {largest:g} is too large for int4")
    exponent = math.frexp(largest)[1] - _FACTOR_BITS if largest else 0
    return 2.0 ** max(exponent, -100)


def _rotated(blocks: Blocks, values_RD: Tensor, channels_C: Tensor) -> Tensor:
    """[N, B]: the blocks without the kept channels, rotated and divided by B."""
    if len(channels_C):
        values_RD = values_RD.index_fill(1, channels_C, 0)
    return hadamard(blocks.split(values_RD)).mul_(1 / blocks.block)


def _scale_codes(rotated_NB: Tensor, top: float) -> Tensor:
    """[N, 1] uint8: the scale of the least squared error, 0 for blocks that are lost.

    Of the eighths of an octave that are nearest to the largest |value|: on average that costs a
    sixth less than the nearest.
    """
    eighths_N1 = (rotated_NB.abs().amax(-1, keepdim=True) / top).log2_().mul_(_OCTAVE).add_(_LAST)
    nearest_N1 = eighths_N1.round_().clamp_(0, _LAST)
    lost_N1 = nearest_N1 == 0
    best_N1, least_N1 = nearest_N1, torch.full_like(nearest_N1, torch.inf)
    for away in _AWAY:
        scale_N1 = (nearest_N1 + away).clamp_(1, _LAST)
        steps = _steps(rotated_NB, scale_N1, top)
        decoded_NB = _coarse(rotated_NB.device).index_select(0, steps).view_as(rotated_NB)
        real_N1 = _scales(rotated_NB.device)[scale_N1.int()] * top
        error_N1 = (decoded_NB.mul_(real_N1).sub_(rotated_NB)).square_().sum(-1, keepdim=True)
        best_N1 = torch.where(error_N1 < least_N1, scale_N1, best_N1)
        least_N1 = torch.minimum(least_N1, error_N1)
    return best_N1.masked_fill(lost_N1, 0).to(torch.uint8)


def _steps(rotated_NB: Tensor, scale_N1: Tensor, top: float) -> Tensor:
    """[N B] int32: the values in truncated 128ths of their scale, from 0 to 255."""
    # Blocks that are lost are divided by infinity.
    real_N1 = (_scales(rotated_NB.device)[scale_N1.int()] * top).masked_fill_(
        scale_N1 == 0, torch.inf
    )
    return (rotated_NB * (128 / real_N1)).add_(128).clamp_(0, 255).view(-1).int()


@functools.lru_cache(maxsize=8)
def _scales(device: torch.device) -> Tensor:
    """[256] float32: the parts of 2^15 factors that scale codes stand for."""
    values = [0.0, *(2.0 ** ((code - _LAST) / _OCTAVE) for code in range(1, _LAST + 1))]
    return torch.tensor(values, dtype=torch.float32, device=device)


@functools.lru_cache(maxsize=8)
def _levels(device: torch.device) -> Tensor:
    """[16] float32: the parts of a scale that codes stand for, rising."""
    negative = [-level for level in reversed(_POSITIVE)]
    return torch.tensor([*negative, *_POSITIVE], dtype=torch.float32, device=device) / 256


@functools.lru_cache(maxsize=8)
def _nearest(device: torch.device) -> Tensor:
    """[256] uint8: the code nearest to (index - 127.5) / 128."""
    centres = (torch.arange(256, device=device) - 127.5) / 128
    distance = (centres.view(-1, 1) - _levels(device)).abs()
    return distance.argmin(-1).to(torch.uint8)


@functools.lru_cache(maxsize=8)
def _coarse(device: torch.device) -> Tensor:
    """[256] float32: the level nearest to (index - 127.5) / 128."""
    return _levels(device)[_nearest(device).int()]


@functools.lru_cache(maxsize=8)
def _pairs(device: torch.device) -> Tensor:
    """[256, 2] float32: the two levels that a byte holds."""
    byte = torch.arange(256, device=device)
    return torch.stack((_levels(device)[byte & 15], _levels(device)[byte >> 4]), dim=-1)
