"""What codecs of 8 bits have in common: a scale per block, and one for the largest channels.

Legend: R rows (tokens), D channels, C channels set apart, K blocks of a row, N = R K blocks,
B values of a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from nesa_node.compression.blocks import Blocks
from nesa_node.compression.codec import (
    DTYPES,
    part_of,
    payload_of,
    round_to,
    rounded_bound,
)
from nesa_node.compression.outliers import largest_channels, list_dtype, read_list

if TYPE_CHECKING:
    from nesa_node.compression.tensors import TensorMeta


@dataclass(frozen=True, slots=True)
class EightBits(ABC):
    """`apart` channels are set apart in rows of at least 16 times as many, none in shorter ones.

    Payload: the list of these channels (2 bytes each, 4 if D > 65,536), rising; a float32 for each
    block [R, K]; one for what is set apart of each row [R]; a byte for each value [R, D]. Those set
    apart count as zeros in the blocks where they lie.
    """

    block: int = 64
    apart: int = 16
    name: ClassVar[str]
    exact: ClassVar[bool] = False

    @abstractmethod
    def _quantize(self, values_NB: Tensor) -> tuple[Tensor, Tensor]:
        """float32 as scales [N] or [N, 1], float32, and codes [N, B] of one byte.

        Raises `ProtocolError("not_finite")`.
        """

    @abstractmethod
    def _dequantize(self, codes: Tensor) -> Tensor:
        """uint8 [n] as multiples of the scale, float32 [n], to be written to."""

    @abstractmethod
    def _bound(self, absmax_N1: Tensor) -> Tensor:
        """How far off values are in blocks with these largest |value|. float64."""

    @property
    def text(self) -> str:
        return f"{self.name}:{self.block}:{self.apart}"

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
        multiples = self._dequantize(codes)
        values_RD = blocks.join(blocks.split(multiples) * scales[: blocks.count].view(-1, 1))
        if count := self._count(blocks):
            channels_C = read_list(data, 0, count, blocks.width).to(device)
            apart_RC = multiples.view(blocks.rows, blocks.width)[:, channels_C]
            values_RD[:, channels_C] = apart_RC * scales[blocks.count :].view(-1, 1)
        return round_to(values_RD.reshape(meta.shape), DTYPES[meta.dtype])

    def error_bound(self, tensor: Tensor) -> Tensor:
        """Of each block by its largest |value|: see `_bound`."""
        blocks = self._blocks(tensor.shape)
        values_RD = tensor.reshape(blocks.rows, blocks.width).float()
        channels_C = largest_channels(values_RD, self._count(blocks))
        values_NB = blocks.split(values_RD.index_fill(1, channels_C, 0).double())
        bound_N1 = self._bound(values_NB.abs().amax(-1, keepdim=True))
        bound_RD = blocks.join(bound_N1.expand(-1, blocks.block).contiguous()).clone()
        if len(channels_C):
            apart_RC = values_RD[:, channels_C].double().abs()
            bound_RD[:, channels_C] = self._bound(apart_RC.amax(-1, keepdim=True))
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
