"""`int4`: a third of 16 bits. Codes of four bits, a fifth that halves their error, a rotation.

A few channels of a language model's hidden states are hundreds of times larger than the others,
for all tokens: they are sent apart, in 16 bits. What is left of each block is rotated, which makes
it nearly Gaussian whatever it was (as in QuaRot, arXiv 2404.00456), and rounded to 32 levels.

Four bits for each of 8 values and a scale of 8 bits would take as much room as five bits for each
of 32 and one scale; their squared error is twice as large (`docs/decisions/009`).

Legend: R rows, D channels, K blocks of a row, N = R K blocks, B values of a block, C kept channels.
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
"""Levels of each sign: the odd multiples of a block's scale up to 31."""
_REACH = 1.04
"""A block's scale is the nearest to 1/32 of its largest rotated |value| times this.

Of the least squared error for hidden states. The largest may lie beyond the last level, and is then
about as far off as values between two levels can be.
"""
_WORST = 0.036
"""How far off a rotated value can be, in parts of the largest of its block.

Between levels 1.04 2^(1/16) / 32 = 0.0340, beyond the last 1 - 1.04 2^(-1/16) 31/32 = 0.0352; the
rest is for float32's rounding.
"""


@dataclass(frozen=True, slots=True)
class Int4:
    """Of the 16 bits of each value one in `share` is for the channels that are kept; 0: none.

    These are the largest. Payload: a factor in float32, a power of two; the list of the C channels,
    rising, of 2 bytes each (4 if D > 65,536); their values / factor [R, C] in float16; a byte for
    each block's scale [N]; the codes [N, B] in five bits (`five_bits.py`).
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
        # Blocks that are lost are divided by infinity.
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
        # Small odd numbers, of which any order of additions makes the same sums.
        levels_NB = codes_NB.float().mul_(2).sub_(2 * _HALF - 1)
        values_RD = blocks.join(hadamard(levels_NB).mul_(real_N.view(-1, 1)))
        if count := self._count(blocks):
            channels_C = read_list(data, 4, count, blocks.width).to(device)
            start = 4 + count * list_dtype(blocks.width).itemsize
            kept = part_of(data, start, blocks.rows * count, torch.float16).to(device)
            values_RD[:, channels_C] = kept.float().view(blocks.rows, count) * factor
        return round_to(values_RD.reshape(meta.shape), DTYPES[meta.dtype])

    def error_bound(self, tensor: Tensor) -> Tensor:
        """Kept: |value| 2^-11 + factor 2^-25. Others: B times 0.036 of a block's largest rotated.

        Each of the B rotated values that a value is the sum of is off by that; and by all of it,
        where it is below 2^-31 of the tensor's largest |value|. Typical errors are a tenth of that:
        they cancel.
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
        """Rows shorter than a block are one block of the next power of two."""
        width = shape[-1] if shape else 1
        return Blocks.of(shape, min(self.block, 1 << (width - 1).bit_length()))

    def _count(self, blocks: Blocks) -> int:
        """As many as list and values have room for; in few rows the list takes much of it."""
        if not self.share:
            return 0
        entry = list_dtype(blocks.width).itemsize + 2 * blocks.rows
        return 2 * blocks.rows * blocks.width // (self.share * entry)

    def _scales_start(self, blocks: Blocks) -> int:
        each = list_dtype(blocks.width).itemsize + 2 * blocks.rows
        return 4 + self._count(blocks) * each


def _unit(factor: float) -> float:
    """The scale of code 255."""
    return factor * 2.0**FACTOR_BITS / (2 * _HALF)


def _rotated(blocks: Blocks, values_RD: Tensor, channels_C: Tensor) -> Tensor:
    """[N, B]: the blocks without the kept channels, rotated and divided by B; a copy."""
    if len(channels_C):
        values_RD = values_RD.index_fill(1, channels_C, 0)
    return hadamard(blocks.split(values_RD)).mul_(1 / blocks.block)


def _scale_codes(rotated_NB: Tensor, factor: float) -> Tensor:
    """[N, 1] uint8: the nearest eighth of an octave, 0 for blocks that are lost."""
    most_N1 = rotated_NB.abs().amax(-1, keepdim=True).mul_(_REACH)
    codes_N1 = eighths(most_N1, factor * 2.0**FACTOR_BITS).round_()
    return codes_N1.clamp_(0, LAST).to(torch.uint8)
