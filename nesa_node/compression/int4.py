"""Codec `int4`: a third of 16 bits per value, by a Hadamard rotation and 5-bit codes.

A few channels of a language model's hidden states are hundreds of times larger than the rest, for
all tokens; these outliers are kept in 16 bits. The rest of each block is rotated, which makes it
nearly Gaussian (as in QuaRot, arXiv 2404.00456), and rounded to 32 levels.

Four bits per value with an 8-bit scale per 8 values take as much space as five bits with a scale
per 32 values, at twice the squared error (`docs/decisions/009`).

Legend: R rows, D channels, K blocks of a row, N = R K blocks, B values of a block, C outlier
channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from nesa_node.compression.blocks import Blocks
from nesa_node.compression.codec import DTYPES, part_of, payload_of, round_to, rounded_bound
from nesa_node.compression.five_bits import pack, packed_nbytes, unpack
from nesa_node.compression.hadamard import hadamard
from nesa_node.compression.octaves import FACTOR_BITS, LAST, eighths, factor_of, scales_of
from nesa_node.compression.outliers import half_bound, largest_channels, list_dtype, read_list

if TYPE_CHECKING:
    from nesa_node.compression.tensors import TensorMeta

_HALF = 16
"""Levels per sign: the odd multiples of a block's scale up to 31."""
_REACH = 1.04
"""A block's scale is the nearest code to its largest rotated |value| times this, over 32.

Chosen for the least squared error on hidden states. The largest value may lie beyond the last
level, with an error about that of values between two levels.
"""
_WORST = 0.036
"""Largest error of a rotated value, relative to the largest of its block.

Between levels 1.04 2^(1/16) / 32 = 0.0340, beyond the last 1 - 1.04 2^(-1/16) 31/32 = 0.0352; the
rest is for float32 rounding.
"""


@dataclass(frozen=True, slots=True)
class Int4:
    """Rotated blocks in 5-bit codes, with outlier channels in float16.

    `share`: one in `share` of the 16 bits per value is spent on outlier channels; 0 for none.
    Payload: a factor in float32, a power of two; the ascending list of the C outlier channels, 2
    bytes each (4 if D > 65,536); their values / factor [R, C] in float16; a byte for each block's
    scale [N]; the codes [N, B] in five bits (`five_bits.py`).
    """

    block: int = 32
    share: int = 48
    exact: ClassVar[bool] = False

    @property
    def text(self) -> str:
        return f"int4@2:{self.block}:{self.share}"

    def nbytes(self, meta: TensorMeta) -> int:
        blocks = self._blocks(meta.shape)
        codes = packed_nbytes(blocks.count * blocks.block)
        return self._scales_start(blocks) + blocks.count + codes

    def encode(self, tensor: Tensor) -> memoryview:
        blocks = self._blocks(tensor.shape)
        values_RD = tensor.view(blocks.rows, blocks.width).float()
        factor = factor_of(values_RD)
        channels_C = largest_channels(values_RD, self._count(blocks))
        rotated_NB = _rotated(blocks, values_RD, channels_C)
        scale_N1 = _scale_codes(rotated_NB, factor)
        # Blocks with scale code 0 decode to zeros; dividing them by infinity avoids 0 / 0.
        step_N1 = scales_of(scale_N1.view(-1), 2 * _unit(factor)).view(-1, 1)
        each_N1 = step_N1.masked_fill_(scale_N1 == 0, torch.inf).reciprocal_()
        codes_NB = rotated_NB.mul_(each_N1).add_(_HALF).clamp_(0, 2 * _HALF - 1).to(torch.uint8)
        return payload_of(
            torch.tensor([factor], dtype=torch.float32, device=tensor.device),
            channels_C.to(list_dtype(blocks.width)),
            (values_RD[:, channels_C] / factor).half(),
            scale_N1,
            pack(codes_NB.view(-1)),
        )

    def decode(self, meta: TensorMeta, data: memoryview, device: torch.device) -> Tensor:
        blocks = self._blocks(meta.shape)
        factor = part_of(data, 0, 1, torch.float32).item()
        start = self._scales_start(blocks)
        scale_N = part_of(data, start, blocks.count, torch.uint8).to(device)
        real_N = scales_of(scale_N, _unit(factor))
        start += blocks.count
        packed = part_of(data, start, data.nbytes - start, torch.uint8).to(device)
        codes_NB = unpack(packed, blocks.count * blocks.block).view(blocks.count, blocks.block)
        # Small odd integers: their sums are exact in any order of additions.
        levels_NB = codes_NB.float().mul_(2).sub_(2 * _HALF - 1)
        values_RD = blocks.join(hadamard(levels_NB).mul_(real_N.view(-1, 1)))
        if count := self._count(blocks):
            channels_C = read_list(data, 4, count, blocks.width).to(device)
            start = 4 + count * list_dtype(blocks.width).itemsize
            kept = part_of(data, start, blocks.rows * count, torch.float16).to(device)
            values_RD[:, channels_C] = kept.float().view(blocks.rows, count) * factor
        return round_to(values_RD.reshape(meta.shape), DTYPES[meta.dtype])

    def error_bound(self, tensor: Tensor) -> Tensor:
        """Outliers: |value| 2^-11 + factor 2^-25. Rest: B times 0.036 of a block's largest rotated.

        A value is the sum of B rotated values, each with that error, or lost entirely if below
        2^-31 of the tensor's largest |value|. Typical errors are a tenth of the bound, since they
        cancel.
        """
        blocks = self._blocks(tensor.shape)
        values_RD = tensor.reshape(blocks.rows, blocks.width).float()
        factor = factor_of(values_RD)
        channels_C = largest_channels(values_RD, self._count(blocks))
        absmax_N1 = _rotated(blocks, values_RD, channels_C).double().abs().amax(-1, keepdim=True)
        each_N1 = absmax_N1 * _WORST + factor * 2.0 ** (FACTOR_BITS - 31)
        bound_NB = (each_N1 * blocks.block).expand(-1, blocks.block).contiguous()
        bound_RD = blocks.join(bound_NB).clone()
        bound_RD[:, channels_C] = half_bound(values_RD[:, channels_C], factor)
        return rounded_bound(tensor, bound_RD.reshape(tensor.shape))

    def _blocks(self, shape: torch.Size | tuple[int, ...]) -> Blocks:
        """The blocks of `shape`; rows shorter than a block are padded to a power of two."""
        width = shape[-1] if shape else 1
        return Blocks.of(shape, min(self.block, 1 << (width - 1).bit_length()))

    def _count(self, blocks: Blocks) -> int:
        """Outlier channels that fit into their share of the payload, list included."""
        if not self.share:
            return 0
        entry = list_dtype(blocks.width).itemsize + 2 * blocks.rows
        return 2 * blocks.rows * blocks.width // (self.share * entry)

    def _scales_start(self, blocks: Blocks) -> int:
        each = list_dtype(blocks.width).itemsize + 2 * blocks.rows
        return 4 + self._count(blocks) * each


def _unit(factor: float) -> float:
    """The scale that code 255 stands for."""
    return factor * 2.0**FACTOR_BITS / (2 * _HALF)


def _rotated(blocks: Blocks, values_RD: Tensor, channels_C: Tensor) -> Tensor:
    """The blocks with outlier channels zeroed, rotated and divided by B, [N, B]; a copy."""
    if len(channels_C):
        values_RD = values_RD.index_fill(1, channels_C, 0)
    return hadamard(blocks.split(values_RD)).mul_(1 / blocks.block)


def _scale_codes(rotated_NB: Tensor, factor: float) -> Tensor:
    """The scale codes, uint8 [N, 1]: the nearest eighth of an octave, 0 for blocks too small."""
    most_N1 = rotated_NB.abs().amax(-1, keepdim=True).mul_(_REACH)
    codes_N1 = eighths(most_N1, factor * 2.0**FACTOR_BITS).round_()
    return codes_N1.clamp_(0, LAST).to(torch.uint8)
