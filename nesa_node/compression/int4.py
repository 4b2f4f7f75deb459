"""Codec `int4`: a third of 16 bits per value, by a Hadamard rotation and 5-bit codes.

A few channels of a language model's hidden states are hundreds of times larger than the rest, for
all tokens; these outliers are kept in 16 bits. The rest of each block is rotated, which makes it
nearly Gaussian (as in QuaRot, arXiv 2404.00456), and rounded to 32 levels.

Four bits per value with an 8-bit scale per 8 values take as much space as five bits with a scale
per 32 values, at twice the squared error (`docs/decisions/009`).

Legend: R rows, D channels, K blocks of a row, N = R K blocks, B values of a block (a power of two),
C outlier channels; n codes, in eight parts of M = ceil(n / 8) codes each.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from nesa_node.compression.codec import (
    DTYPES,
    TensorLayout,
    concat_bytes,
    read_values,
    round_to_dtype,
)
from nesa_node.compression.quantization import (
    FACTOR_BITS,
    MAX_SCALE_CODE,
    QuantBlocks,
    channel_dtype,
    decode_scales,
    float16_factor,
    largest_channels,
    read_channels,
    to_scale_codes,
)

_LOW_MASK = 15
_FIFTH_BIT = 16


def five_bits_nbytes(count: int) -> int:
    return 5 * -(-count // 8)


def pack_five_bits(codes: Tensor) -> Tensor:
    """Pack uint8 [n] below 32 into uint8 [5 M].

    The codes are cut into parts 0 to 7 of M codes each (the last is zero-padded). The first 4 M
    bytes hold the low bits of parts 0 to 3, and in their upper halves those of parts 4 to 7; bit k
    of the last M bytes holds the fifth bits of part k. So operations run on long rows.
    """
    parts_8M = torch.nn.functional.pad(codes, (0, -len(codes) % 8)).view(8, -1)
    low_4M = (parts_8M[:4] & _LOW_MASK) | (parts_8M[4:] << 4)
    fifth_XM = parts_8M >> 4 << _bit_positions(codes.device)
    while len(fifth_XM) > 1:
        half = len(fifth_XM) // 2
        fifth_XM = fifth_XM[:half] | fifth_XM[half:]
    return torch.cat((low_4M, fifth_XM)).view(-1)


def unpack_five_bits(packed: Tensor, count: int) -> Tensor:
    """The inverse of `pack`: uint8 [n], of `five_bits_nbytes(n)` bytes."""
    bytes_5M = packed.view(5, -1)
    low_4M, fifth_1M = bytes_5M[:4], bytes_5M[4:]
    codes_8M = torch.cat((low_4M & _LOW_MASK, low_4M >> 4))
    codes_8M |= (fifth_1M >> _bit_positions(packed.device) << 4) & _FIFTH_BIT
    return codes_8M.view(-1)[:count]


@functools.lru_cache(maxsize=8)
def _bit_positions(device: torch.device) -> Tensor:
    """The bit positions 0 to 7, uint8 [8, 1]."""
    return torch.arange(8, dtype=torch.uint8, device=device).view(8, 1)


def hadamard_transform(values_NB: Tensor) -> Tensor:
    """Multiply each block by the matrix with entries (-1)^popcount(i & j). float32; a copy.

    It spreads every value over its block. Applied twice it multiplies by B. Exact for integers if
    all sums are below 2^24 (and values below 2^8 if torch may multiply in reduced precision); for
    other values each device rounds sums in its own order. The usual log2(B) rounds of additions
    take ten times as long, since each is an operation on strided memory.
    """
    # Autocast does not apply to operations with `out`.
    matrix = _hadamard_matrix(values_NB.shape[1], values_NB.device)
    return torch.mm(values_NB, matrix, out=torch.empty_like(values_NB))


@functools.lru_cache(maxsize=32)
def _hadamard_matrix(block: int, device: torch.device) -> Tensor:
    """The Hadamard matrix, float32 [B, B], by Sylvester's construction [[H, H], [H, -H]]."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < block:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


_LEVELS_PER_SIGN = 16
"""Levels per sign: the odd multiples of a block's scale up to 31."""
_SCALE_MARGIN = 1.04
"""A block's scale is the nearest code to its largest rotated |value| times this, over 32.

Chosen for the least squared error on hidden states. The largest value may lie beyond the last
level, with an error about that of values between two levels.
"""


@dataclass(frozen=True, slots=True)
class Int4:
    """Rotated blocks in 5-bit codes, with outlier channels in float16.

    `share`: one in `share` of the 16 bits per value is spent on outlier channels; 0 for none.
    Payload: a factor in float32, a power of two; the ascending list of the C outlier channels, 2
    bytes each (4 if D > 65,536); their values / factor [R, C] in float16; a byte for each block's
    scale [N]; the codes [N, B] in five bits (`pack_five_bits`).

    Errors are at most |value| 2^-11 + factor 2^-25 for outliers. For other values they are at most
    B times 0.036 of the block's largest rotated |value| plus 2^-31 of the tensor's largest, as a
    value is the sum of B rotated ones; typical errors are a tenth of that. A rotated value has an
    error of 1.04 2^(1/16) / 32 = 0.0340 between levels and 1 - 1.04 2^(-1/16) 31/32 = 0.0352 beyond
    the last; the rest is for float32 rounding.
    """

    block: int = 32
    outlier_share: int = 48

    @property
    def text(self) -> str:
        return f"int4@2:{self.block}:{self.outlier_share}"

    def nbytes(self, meta: TensorLayout) -> int:
        blocks = self._blocks(meta.shape)
        codes = five_bits_nbytes(blocks.count * blocks.block)
        return self._scales_start(blocks) + blocks.count + codes

    def encode(self, tensor: Tensor) -> memoryview:
        blocks = self._blocks(tensor.shape)
        values_RD = tensor.view(blocks.rows, blocks.width).float()
        factor = float16_factor(values_RD)
        channels_C = largest_channels(values_RD, self._num_outliers(blocks))
        rotated_NB = _rotate_blocks(blocks, values_RD, channels_C)
        scale_N1 = _int4_scale_codes(rotated_NB, factor)
        # Blocks with scale code 0 decode to zeros; dividing them by infinity avoids 0 / 0.
        step_N1 = decode_scales(scale_N1.view(-1), 2 * _max_int4_scale(factor)).view(-1, 1)
        each_N1 = step_N1.masked_fill_(scale_N1 == 0, torch.inf).reciprocal_()
        codes_NB = (
            rotated_NB.mul_(each_N1)
            .add_(_LEVELS_PER_SIGN)
            .clamp_(0, 2 * _LEVELS_PER_SIGN - 1)
            .to(torch.uint8)
        )
        return concat_bytes(
            torch.tensor([factor], dtype=torch.float32, device=tensor.device),
            channels_C.to(channel_dtype(blocks.width)),
            (values_RD[:, channels_C] / factor).half(),
            scale_N1,
            pack_five_bits(codes_NB.view(-1)),
        )

    def decode(self, meta: TensorLayout, data: memoryview, device: torch.device) -> Tensor:
        blocks = self._blocks(meta.shape)
        factor = read_values(data, 0, 1, torch.float32).item()
        start = self._scales_start(blocks)
        scale_N = read_values(data, start, blocks.count, torch.uint8).to(device)
        real_N = decode_scales(scale_N, _max_int4_scale(factor))
        start += blocks.count
        packed = read_values(data, start, data.nbytes - start, torch.uint8).to(device)
        codes_NB = unpack_five_bits(packed, blocks.count * blocks.block).view(
            blocks.count, blocks.block
        )
        # Small odd integers: their sums are exact in any order of additions.
        levels_NB = codes_NB.float().mul_(2).sub_(2 * _LEVELS_PER_SIGN - 1)
        values_RD = blocks.join(hadamard_transform(levels_NB).mul_(real_N.view(-1, 1)))
        if count := self._num_outliers(blocks):
            channels_C = read_channels(data, 4, count, blocks.width).to(device)
            start = 4 + count * channel_dtype(blocks.width).itemsize
            kept = read_values(data, start, blocks.rows * count, torch.float16).to(device)
            values_RD[:, channels_C] = kept.float().view(blocks.rows, count) * factor
        return round_to_dtype(values_RD.reshape(meta.shape), DTYPES[meta.dtype])

    def _blocks(self, shape: torch.Size | tuple[int, ...]) -> QuantBlocks:
        """The blocks of `shape`; rows shorter than a block are padded to a power of two."""
        width = shape[-1] if shape else 1
        return QuantBlocks.from_shape(shape, min(self.block, 1 << (width - 1).bit_length()))

    def _num_outliers(self, blocks: QuantBlocks) -> int:
        """Outlier channels that fit into their share of the payload, list included."""
        if not self.outlier_share:
            return 0
        entry = channel_dtype(blocks.width).itemsize + 2 * blocks.rows
        return 2 * blocks.rows * blocks.width // (self.outlier_share * entry)

    def _scales_start(self, blocks: QuantBlocks) -> int:
        each = channel_dtype(blocks.width).itemsize + 2 * blocks.rows
        return 4 + self._num_outliers(blocks) * each


def _max_int4_scale(factor: float) -> float:
    """The scale that code 255 stands for."""
    return factor * 2.0**FACTOR_BITS / (2 * _LEVELS_PER_SIGN)


def _rotate_blocks(blocks: QuantBlocks, values_RD: Tensor, channels_C: Tensor) -> Tensor:
    """The blocks with outlier channels zeroed, rotated and divided by B, [N, B]; a copy."""
    if len(channels_C):
        values_RD = values_RD.index_fill(1, channels_C, 0)
    return hadamard_transform(blocks.split(values_RD)).mul_(1 / blocks.block)


def _int4_scale_codes(rotated_NB: Tensor, factor: float) -> Tensor:
    """The scale codes, uint8 [N, 1]: the nearest eighth of an octave, 0 for blocks too small."""
    most_N1 = rotated_NB.abs().amax(-1, keepdim=True).mul_(_SCALE_MARGIN)
    codes_N1 = to_scale_codes(most_N1, factor * 2.0**FACTOR_BITS).round_()
    return codes_N1.clamp_(0, MAX_SCALE_CODE).to(torch.uint8)
