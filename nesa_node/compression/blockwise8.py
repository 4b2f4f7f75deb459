"""Codec `blockwise8`: dynamic 8-bit blockwise quantization, as in bitsandbytes.

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
from typing import Any, ClassVar

import torch
from torch import Tensor

from nesa_node.compression.codec import (
    DTYPES,
    MIN_BLOCK_ABSMAX,
    TensorLayout,
    add_rounding_bound,
    concat_bytes,
    read_values,
    require_finite,
    round_to_dtype,
)
from nesa_node.compression.quantization import (
    QuantBlocks,
    channel_dtype,
    float16_bound,
    float16_factor,
    join_float16,
    largest_channels,
    read_channels,
    split_float16,
    zero_channels,
)
from nesa_node.core.extras import require_node

_MAP_DECADES = 7
_MAX_RELATIVE_ERROR = 0.9 / 128 + 2.0**-14
"""Largest error relative to a block's largest |value|: half the largest step of the map, plus an
error of bitsandbytes on the CPU, where a lookup table of 2^16 entries can return the second-nearest
code."""
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
    """

    block: int = 64
    outliers: int = 8
    exact: ClassVar[bool] = False

    @property
    def text(self) -> str:
        return f"blockwise8@2:{self.block}:{self.outliers}"

    def nbytes(self, meta: TensorLayout) -> int:
        blocks = self._blocks(meta.shape)
        count = self._num_outliers(blocks)
        start = _scales_start(blocks, count)
        return start + 4 * blocks.count + blocks.rows * (count + blocks.width)

    def encode(self, tensor: Tensor) -> memoryview:
        blocks = self._blocks(tensor.shape)
        values_RD = tensor.view(blocks.rows, blocks.width).float()
        count = self._num_outliers(blocks)
        if not count:
            scale_N, codes_NB = self._quantize(blocks.split(values_RD))
            return concat_bytes(scale_N, blocks.join(codes_NB).contiguous())
        factor = float16_factor(values_RD)
        channels_C = largest_channels(values_RD, count)
        scale_N, codes_NB = self._quantize(blocks.split(zero_channels(values_RD, channels_C)))
        codes_RD = blocks.join(codes_NB).contiguous()
        codes_RD[:, channels_C], upper_RC = split_float16(values_RD[:, channels_C], factor)
        return concat_bytes(
            torch.tensor([factor], dtype=torch.float32, device=tensor.device),
            channels_C.to(channel_dtype(blocks.width)),
            scale_N,
            upper_RC,
            codes_RD,
        )

    def decode(self, meta: TensorLayout, data: memoryview, device: torch.device) -> Tensor:
        blocks = self._blocks(meta.shape)
        count = self._num_outliers(blocks)
        start = _scales_start(blocks, count)
        scale_N = read_values(data, start, blocks.count, torch.float32).to(device)
        start += scale_N.nbytes
        upper = read_values(data, start, blocks.rows * count, torch.uint8).to(device)
        start += upper.nbytes
        codes = read_values(data, start, blocks.rows * blocks.width, torch.uint8).to(device)
        multiples = dynamic_map(device).index_select(0, codes.int())
        values_RD = blocks.join(blocks.split(multiples) * scale_N.view(-1, 1))
        if count:
            factor = read_values(data, 0, 1, torch.float32).item()
            channels_C = read_channels(data, 4, count, blocks.width).to(device)
            lower_RC = codes.view(blocks.rows, blocks.width)[:, channels_C]
            upper_RC = upper.view(blocks.rows, count)
            values_RD[:, channels_C] = join_float16(lower_RC, upper_RC, factor)
        return round_to_dtype(values_RD.reshape(meta.shape), DTYPES[meta.dtype])

    def error_bound(self, tensor: Tensor) -> Tensor:
        """Outliers: |value| 2^-11 + factor 2^-25.

        Remaining values: a block's largest |value| times (0.9 / 128 + 2^-14), plus 2^-100.
        """
        blocks = self._blocks(tensor.shape)
        values_RD = tensor.reshape(blocks.rows, blocks.width).float()
        channels_C = largest_channels(values_RD, self._num_outliers(blocks))
        values_NB = blocks.split(zero_channels(values_RD, channels_C)).double()
        bound_N1 = (
            values_NB.abs().amax(-1, keepdim=True) * _MAX_RELATIVE_ERROR * (1 + 2.0**-12)
            + MIN_BLOCK_ABSMAX
        )
        bound_RD = blocks.join(bound_N1.expand(-1, blocks.block).contiguous()).clone()
        if len(channels_C):
            factor = float16_factor(values_RD)
            bound_RD[:, channels_C] = float16_bound(values_RD[:, channels_C], factor)
        return add_rounding_bound(tensor, bound_RD.reshape(tensor.shape))

    def _blocks(self, shape: torch.Size | tuple[int, ...]) -> QuantBlocks:
        """The blocks of `shape`; rows shorter than a block are one short block without padding."""
        return QuantBlocks.from_shape(shape, min(self.block, shape[-1] if shape else 1))

    def _num_outliers(self, blocks: QuantBlocks) -> int:
        return min(self.outliers, blocks.width // _CHANNELS_PER_OUTLIER)

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


def _scales_start(blocks: QuantBlocks, count: int) -> int:
    return 4 + count * channel_dtype(blocks.width).itemsize if count else 0


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
