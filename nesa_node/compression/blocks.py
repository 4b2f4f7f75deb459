"""Quantization blocks: a tensor cut along its last axis, so that no block spans two tokens.

Legend: R rows (tokens; the product of all axes but the last), D channels (values of a row), K
blocks of a row, N = R K blocks, B values of a block, C outlier channels. The last block of a row
may be shorter; it is padded with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """The division of a shape into blocks of `block` values."""

    rows: int
    width: int
    block: int

    @classmethod
    def of(cls, shape: Sequence[int], block: int) -> Self:
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
