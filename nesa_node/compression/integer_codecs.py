"""Codecs of 4 and 8 bits per value. Outliers and scales decide about their errors.

A few channels of a language model's hidden states are hundreds of times larger than the rest, for
all tokens; these outliers are kept in 16 bits. In fewer bits they would cause more error than all
the rest (`docs/decisions/016`).

`int4`: a third of 16 bits per value. The rest of each block is rotated (Hadamard), which makes it
nearly Gaussian (as in QuaRot, arXiv 2404.00456), and rounded to 32 levels. Four bits per value with
an 8-bit scale per 8 values take as much space as five bits with a scale per 32 values, at twice the
squared error (`docs/decisions/009`).

`int8`: integers from -127 to 127 with a one-byte scale per 16 values: small blocks with such scales
take no more space than large ones with float32 scales.

`blockwise8`: dynamic 8-bit blockwise quantization, as in bitsandbytes. Dettmers, "8-Bit
Approximations for Parallelism in Deep Learning" (arXiv 1511.04561), and Dettmers et al., "8-bit
Optimizers via Block-wise Quantization" (arXiv 2110.02861). Unlike there, blocks end with the row.

Legend: R rows (tokens), D channels, K blocks of a row, N = R K blocks, B values of a block (for
`int4` a power of two), C outlier channels; n codes, in eight parts of M = ceil(n / 8) codes each.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nesa_node.compression.codec import (
    DTYPES,
    MIN_BLOCK_ABSMAX,
    TensorLayout,
    concat_bytes,
    read_values,
    require_finite,
    round_to_dtype,
)
from nesa_node.compression.quantization import (
    FACTOR_BITS,
    MAX_SCALE_CODE,
    EightBitPayload,
    QuantBlocks,
    channel_dtype,
    decode_scales,
    float16_factor,
    largest_channels,
    read_channels,
    to_scale_codes,
    zero_channels,
)
from nesa_node.core.errors import require_node

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


_MAP_DECADES = 7
_CHANNELS_PER_OUTLIER = 64
"""Channels per outlier channel, at least."""


@dataclass(frozen=True, slots=True)
class Blockwise8:
    """value = `dynamic_map()[code]` * scale; the scale is the block's largest |value|.

    Encoding imports bitsandbytes (seconds, once); decoding does not. `outliers`: outlier channels,
    at most one in 64, which keeps the payload within 0.54 of 16 bits per value.

    Payload: a factor in float32, a power of two; the ascending list of the C outlier channels, 2
    bytes each (4 if D > 65,536); each block's scale in float32 [N]; the upper bytes of the outliers
    / factor in float16 [R, C]; a byte per value [R, D]: its code, or the lower byte of an outlier,
    which counts as zero in its block. Without outliers there is no factor, and no value is too
    large.

    Errors are at most |value| 2^-11 + factor 2^-25 for outliers, and for other values the block's
    largest |value| times (0.9 / 128 + 2^-14), plus 2^-100: half the largest step of the map, plus
    an error of bitsandbytes on the CPU, where a lookup table of 2^16 entries can return the
    second-nearest code.
    """

    block: int = 64
    outliers: int = 8

    @property
    def text(self) -> str:
        return f"blockwise8@2:{self.block}:{self.outliers}"

    def nbytes(self, meta: TensorLayout) -> int:
        return self.payload(meta.shape).nbytes

    def encode(self, tensor: Tensor) -> memoryview:
        payload = self.payload(tensor.shape)
        blocks = payload.blocks
        values_RD = tensor.view(blocks.rows, blocks.width).float()
        if not payload.has_factor:
            scale_N, codes_NB = self._quantize(blocks.split(values_RD))
            return concat_bytes(scale_N, blocks.join(codes_NB).contiguous())
        factor = float16_factor(values_RD)
        channels_C = largest_channels(values_RD, payload.num_outliers)
        scale_N, codes_NB = self._quantize(blocks.split(zero_channels(values_RD, channels_C)))
        codes_RD = blocks.join(codes_NB).contiguous()
        return payload.write(values_RD, channels_C, factor, scale_N, codes_RD)

    def decode(self, meta: TensorLayout, data: memoryview, device: torch.device) -> Tensor:
        payload = self.payload(meta.shape)
        blocks = payload.blocks
        scale_N, upper_RC, codes_RD = payload.read(data, device)
        multiples = dynamic_map(device).index_select(0, codes_RD.view(-1).int())
        values_RD = blocks.join(blocks.split(multiples) * scale_N.view(-1, 1))
        payload.restore_outliers(values_RD, data, upper_RC, codes_RD)
        return round_to_dtype(values_RD.reshape(meta.shape), DTYPES[meta.dtype])

    def payload(self, shape: torch.Size | tuple[int, ...]) -> EightBitPayload:
        """The payload of `shape`; rows shorter than a block are one short block without padding."""
        blocks = QuantBlocks.from_shape(shape, min(self.block, shape[-1] if shape else 1))
        count = min(self.outliers, blocks.width // _CHANNELS_PER_OUTLIER)
        return EightBitPayload(blocks, count, torch.float32, has_factor=count > 0)

    def _quantize(self, values_NB: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize float32 [N, B] to scales [N], float32, and codes [N, B], uint8.

        Raises `ProtocolError("not_finite")`.
        """
        require_finite(values_NB)
        count, width = values_NB.shape
        if width < self.block and not values_NB.is_cpu:
            # The CUDA kernels support few block sizes; zero padding does not change the scale.
            values_NB = torch.nn.functional.pad(values_NB, (0, self.block - width))
        # The operator below bitsandbytes' `quantize_blockwise`, which copies the map per call.
        codes, absmax_N = _bitsandbytes_operators().quantize_blockwise.default(
            values_NB, dynamic_map(values_NB.device), values_NB.shape[1]
        )
        codes_NB = codes.view(count, -1)[:, :width].contiguous()
        return absmax_N.masked_fill_(absmax_N < MIN_BLOCK_ABSMAX, 0), codes_NB


@functools.lru_cache(maxsize=8)
def dynamic_map(device: torch.device) -> Tensor:
    """The value of each code relative to the block's largest |value|, float32 [256], ascending.

    Zero, one, and with both signs in each of seven decades i = 0..6: the centres of 2^i equal parts
    of [0.1, 1], times 10^(i-6). Equal to `bitsandbytes.functional.create_dynamic_map()`.
    """
    positive: list[float] = []
    for decade in range(_MAP_DECADES):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        centres = (edges[:-1] + edges[1:]) / 2
        positive += (10 ** (decade + 1 - _MAP_DECADES) * centres).tolist()
    values = sorted([0.0, 1.0, *positive, *(-value for value in positive)])
    return torch.tensor(values, dtype=torch.float32, device=device)


@functools.cache
def _bitsandbytes_operators() -> Any:
    """bitsandbytes' operators, imported on first use: that takes seconds and about 100 MiB."""
    require_node("sending in blockwise8", "bitsandbytes")
    # The import logs a warning about a missing kernel for 4-bit weights, which is not used here.
    noisy = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        import bitsandbytes  # noqa: F401  (registers the operators)
    finally:
        noisy.setLevel(level)
    return torch.ops.bitsandbytes
