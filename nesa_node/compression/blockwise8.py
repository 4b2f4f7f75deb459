"""`blockwise8`: dynamic 8-bit blockwise quantization, as bitsandbytes does it.

Dettmers, "8-Bit Approximations for Parallelism in Deep Learning" (arXiv 1511.04561), and Dettmers
et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861). Here blocks end with the
row, and outliers have their own: bitsandbytes' run on into the next row, whatever is in them.

Legend: R rows (tokens), D channels, C channels set apart, K blocks of a row, N = R K blocks,
B values of a block.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from nesa_node.compression.blocks import Blocks
from nesa_node.compression.codec import (
    DTYPES,
    SMALLEST,
    part_of,
    payload_of,
    require_finite,
    round_to,
    rounded_bound,
)
from nesa_node.compression.outliers import largest_channels, list_dtype, read_list

if TYPE_CHECKING:
    from nesa_node.compression.tensors import TensorMeta

_DECADES = 7
_WORST = 0.9 / 128 + 2.0**-14
"""Half the largest distance of two neighbours in the map, and what bitsandbytes misses on the CPU.

There it looks codes up in a table of 2^16 steps: next to halfway it can take the second best.
"""


@dataclass(frozen=True, slots=True)
class Blockwise8:
    """value = `dynamic_map()[code]` * scale; the scale is the block's largest |value|.

    Encoding imports bitsandbytes (seconds, once); decoding does without. `apart` channels are set
    apart in rows of at least 16 times as many, none in shorter ones.

    Payload: the list of these channels (2 bytes each, 4 if D > 65,536), rising; a float32 for each
    block [R, K]; one for what is set apart of each row [R]; a byte for each value [R, D]. Those set
    apart count as zeros in the blocks where they lie.
    """

    block: int = 64
    apart: int = 16
    exact: ClassVar[bool] = False

    @property
    def text(self) -> str:
        return f"blockwise8:{self.block}:{self.apart}"

    def nbytes(self, meta: TensorMeta) -> int:
        blocks = self._blocks(meta.shape)
        return self._scales_start(blocks) + 4 * self._scales(blocks) + blocks.rows * blocks.width

    def encode(self, tensor: Tensor) -> memoryview:
        blocks = self._blocks(tensor.shape)
        values_RD = tensor.view(blocks.rows, blocks.width).float()
        count = self._count(blocks)
        if not count:
            scale_N, codes_NB = self._quantize(blocks.split(values_RD))
            return payload_of(scale_N, blocks.join(codes_NB).contiguous())
        channels_C = largest_channels(values_RD, count)
        apart_RC = values_RD[:, channels_C]
        scale_N, codes_NB = self._quantize(blocks.split(values_RD.index_fill(1, channels_C, 0)))
        scale_R, codes_RC = self._quantize(apart_RC)
        codes_RD = blocks.join(codes_NB).contiguous()
        codes_RD[:, channels_C] = codes_RC
        return payload_of(channels_C.to(list_dtype(blocks.width)), scale_N, scale_R, codes_RD)

    def decode(self, meta: TensorMeta, data: memoryview, device: torch.device) -> Tensor:
        blocks = self._blocks(meta.shape)
        start = self._scales_start(blocks)
        scales = part_of(data, start, self._scales(blocks), torch.float32).to(device)
        start += scales.nbytes
        codes = part_of(data, start, blocks.rows * blocks.width, torch.uint8).to(device)
        multiples = dynamic_map(device).index_select(0, codes.int())
        values_RD = blocks.join(blocks.split(multiples) * scales[: blocks.count].view(-1, 1))
        if count := self._count(blocks):
            channels_C = read_list(data, 0, count, blocks.width).to(device)
            apart_RC = multiples.view(blocks.rows, blocks.width)[:, channels_C]
            values_RD[:, channels_C] = apart_RC * scales[blocks.count :].view(-1, 1)
        return round_to(values_RD.reshape(meta.shape), DTYPES[meta.dtype])

    def error_bound(self, tensor: Tensor) -> Tensor:
        """Of a block the largest |value| times 0.9 / 128 + 2^-14, and 2^-100."""
        blocks = self._blocks(tensor.shape)
        values_RD = tensor.reshape(blocks.rows, blocks.width).float()
        channels_C = largest_channels(values_RD, self._count(blocks))
        values_NB = blocks.split(values_RD.index_fill(1, channels_C, 0).double())
        bound_N1 = _bound(values_NB.abs().amax(-1, keepdim=True))
        bound_RD = blocks.join(bound_N1.expand(-1, blocks.block).contiguous()).clone()
        if len(channels_C):
            apart_RC = values_RD[:, channels_C].double().abs()
            bound_RD[:, channels_C] = _bound(apart_RC.amax(-1, keepdim=True))
        return rounded_bound(tensor, bound_RD.reshape(tensor.shape))

    def _blocks(self, shape: torch.Size | tuple[int, ...]) -> Blocks:
        """Rows that are shorter than a block are one short block: nothing is padded."""
        return Blocks.of(shape, min(self.block, shape[-1] if shape else 1))

    def _count(self, blocks: Blocks) -> int:
        return self.apart if blocks.width >= 16 * self.apart else 0

    def _scales(self, blocks: Blocks) -> int:
        return blocks.count + (blocks.rows if self._count(blocks) else 0)

    def _scales_start(self, blocks: Blocks) -> int:
        return self._count(blocks) * list_dtype(blocks.width).itemsize

    def _quantize(self, values_NB: Tensor) -> tuple[Tensor, Tensor]:
        """float32 as scales [N], float32, and codes [N, B], uint8.

        Raises `ProtocolError("not_finite")`.
        """
        require_finite(values_NB)
        count, width = values_NB.shape
        if width < self.block and not values_NB.is_cpu:
            # Its CUDA kernels know few sizes of blocks; zeros change nothing.
            values_NB = torch.nn.functional.pad(values_NB, (0, self.block - width))
        # What its `quantize_blockwise` calls, without a copy of the map in a state for each call.
        codes, absmax_N = _operators().quantize_blockwise.default(
            values_NB, dynamic_map(values_NB.device), values_NB.shape[1]
        )
        codes_NB = codes.view(count, -1)[:, :width].contiguous()
        return absmax_N.masked_fill_(absmax_N < SMALLEST, 0), codes_NB


def _bound(absmax_N1: Tensor) -> Tensor:
    """How far off values are in blocks with these largest |value|. float64."""
    return absmax_N1 * _WORST * (1 + 2.0**-12) + SMALLEST


@functools.lru_cache(maxsize=8)
def dynamic_map(device: torch.device) -> Tensor:
    """[256] float32, rising: what each code stands for, as a part of the block's largest |value|.

    Zero, one, and with both signs in each of seven decades i = 0..6: the centres of 2^i equal parts
    of [0.1, 1], times 10^(i-6). Equal to `bitsandbytes.functional.create_dynamic_map()`.
    """
    positive: list[float] = []
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        centres = (edges[:-1] + edges[1:]) / 2
        positive += (10 ** (decade + 1 - _DECADES) * centres).tolist()
    values = sorted([0.0, 1.0, *positive, *(-value for value in positive)])
    return torch.tensor(values, dtype=torch.float32, device=device)


@functools.cache
def _operators() -> Any:
    """Its operators. The import takes seconds and some 100 MiB, so that only users pay for it."""
    # It tells everybody that a kernel for 4-bit weights, which is not used here, is not there.
    noisy = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        import bitsandbytes  # noqa: F401  (it registers them)
    finally:
        noisy.setLevel(level)
    return torch.ops.bitsandbytes
