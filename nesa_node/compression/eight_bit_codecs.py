"""Codec `int8`: integers from -127 to 127 with a scale per 16 values, outliers in 16 bits.

A few channels of a language model's hidden states are hundreds of times larger than the rest. In
eight bits they would cause more error than all the rest, so that they get 16 bits; one-byte scales
of small blocks take no more space than float32 scales of large ones (`docs/decisions/016`).

Codec `blockwise8`: dynamic 8-bit blockwise quantization, as in bitsandbytes.

Dettmers, "8-Bit Approximations for Parallelism in Deep Learning" (arXiv 1511.04561), and Dettmers
et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861). Unlike in bitsandbytes,
blocks end with the row, and the largest channels (outliers) are kept in 16 bits
(`docs/decisions/016`).

Legend: R rows (tokens), D channels, C outlier channels, K blocks of a row, N = R K blocks,
B values of a block.
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
    require_finite,
    round_to_dtype,
)
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
from nesa_node.core.extras import require_node

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
