"""A weight that several stored tensors hold in few bits, and how it is made whole.

O outputs (rows), I inputs (columns), R rows of scales, G groups of columns with a scale each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from nesa_node.core.errors import CorruptCheckpointError
from nesa_node.engine.kernels.machine_code import allocate_in_huge_pages
from nesa_node.engine.weights.files import TensorInfo, read_tensor

CHUNK_VALUES = 1 << 18
"""Values that are dequantized at once: 1 MiB in float32, which a core's cache holds."""
ROW_STEP = 32
"""Rows of a chunk are a multiple of it, so that it begins with a whole word whatever the bits."""

VALUES, SCALE, ZERO, GROUPS = "values", "scale", "zero", "groups"
GLOBAL_SCALE = "global scale"
"""What a stored tensor is to a weight."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Scales, and zero points, of a matrix: a value is `(stored - zero) * scale`, in float32."""

    scale_RG: Tensor
    zero_RG: Tensor | None
    rows_per_scale: int
    columns_per_scale: int
    group_I: Tensor | None = None
    """The group of each column, where groups are no runs of `columns_per_scale`."""

    def scale_rows(self, values_OI: Tensor, start: int) -> Tensor:
        """Return rows from row `start` on, float32, made of what is stored for them. Modifies it.

        Raises `ValueError` for a group that has no scale.
        """
        count, inputs = values_OI.shape
        rows = torch.arange(start, start + count) // self.rows_per_scale
        if self.group_I is None and inputs % self.columns_per_scale == 0:
            view = values_OI.view(count, -1, self.columns_per_scale)
            if self.zero_RG is not None:
                view.sub_(self.zero_RG[rows].unsqueeze(-1))
            view.mul_(self.scale_RG[rows].unsqueeze(-1))
            return values_OI
        group_I = self.group_I
        if group_I is None:
            group_I = torch.arange(inputs) // self.columns_per_scale
        if int(group_I.min()) < 0 or int(group_I.max()) >= self.scale_RG.shape[1]:
            raise ValueError(f"a column's group is none of the {self.scale_RG.shape[1]}")
        if self.zero_RG is not None:
            values_OI.sub_(self.zero_RG[rows][:, group_I])
        return values_OI.mul_(self.scale_RG[rows][:, group_I])


class Layout(Protocol):
    """How stored tensors hold a matrix [O, I]. Both methods raise `ValueError` for wrong values."""

    def read_grid(self, stored: Mapping[str, Tensor]) -> Grid: ...

    def read_rows(self, values: Tensor, start: int, stop: int) -> Tensor:
        """Return what is stored of these rows [stop - start, I]: as float32 in new memory."""


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A weight as the model has it, and the stored tensors that it is made from.

    A shape of three dimensions is that of experts, each with a matrix of its own.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Of the weight once it is read."""
    stored: Mapping[str, TensorInfo]
    layout: Layout
    is_transposed: bool = False
    """The matrix is [I, O] in the model."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that reading takes: of the weight and of what it is made from."""
        read = sum(info.nbytes for info in self.stored.values())
        return self.numel * self.dtype.itemsize + read

    @property
    def files(self) -> tuple[str, ...]:
        return tuple({info.file for info in self.stored.values()})

    def read(self, folder: Path) -> Tensor:
        """Read and dequantize it into new CPU memory, in float32 rounded once to its dtype.

        Peak memory is `nbytes` and a chunk. Raises `CorruptCheckpointError`.
        """
        stored = {role: read_tensor(folder, info) for role, info in self.stored.items()}
        made = allocate_in_huge_pages(self.shape, self.dtype)
        try:
            if len(self.shape) == 2:
                self._fill(made, stored)
            else:
                for index, matrix in enumerate(made):
                    self._fill(matrix, {role: tensor[index] for role, tensor in stored.items()})
        except ValueError as error:
            raise CorruptCheckpointError(f"{folder}: {self.name}: {error}") from error
        return made

    def _fill(self, matrix: Tensor, stored: Mapping[str, Tensor]) -> None:
        matrix_OI = matrix.T if self.is_transposed else matrix
        outputs, inputs = matrix_OI.shape
        grid = self.layout.read_grid(stored)
        step = max(CHUNK_VALUES // inputs // ROW_STEP * ROW_STEP, ROW_STEP)
        for start in range(0, outputs, step):
            stop = min(start + step, outputs)
            values = self.layout.read_rows(stored[VALUES], start, stop).to(torch.float32)
            matrix_OI[start:stop] = grid.scale_rows(values, start)


FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e8m0fnu,
    torch.uint8,  # exponents of two, as float8_e8m0fnu has them
)
_EXPONENT_BIAS = 127


def read_scale(stored: Tensor) -> Tensor:
    """Return scales in float32."""
    if stored.dtype == torch.uint8:
        ones = torch.ones_like(stored, dtype=torch.float32)
        return torch.ldexp(ones, stored.to(torch.int32) - _EXPONENT_BIAS)
    return stored.to(torch.float32)


def unpack_integers(packed: Tensor, bits: int) -> Tensor:
    """Return the unsigned numbers of 2, 3, 4 or 8 bits that a row of words holds: uint8.

    `packed` [..., W] is int32 or uint8. A row's bits follow each other from each word's lowest on;
    in 3 bits, W words are whole runs of three bytes. Returns [..., 8 / bits * bytes].
    """
    data = packed.contiguous().view(torch.uint8)
    if bits == 8:
        return data
    if bits == 3:
        first, second, third = data.view(*data.shape[:-1], -1, 3).to(torch.int32).unbind(-1)
        runs = (first | second << 8 | third << 16).unsqueeze(-1)
        triples: Tensor = (runs >> torch.arange(0, 24, 3)) & 7
        return triples.to(torch.uint8).flatten(-2)
    numbers: Tensor = (data.unsqueeze(-1) >> torch.arange(0, 8, bits, dtype=torch.uint8)) & (
        2**bits - 1
    )
    return numbers.flatten(-2)


def _as_stored(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Rows of values as they follow each other, and scales [R, G], or one for all.

    Zero points have the scales' shape, unless `unpack_zero` makes it.
    """

    outputs: int
    inputs: int
    rows_per_scale: int
    columns_per_scale: int
    unpack: Callable[[Tensor], Tensor] = _as_stored
    unpack_zero: Callable[[Tensor], Tensor] | None = None
    divides: bool = False
    """The global scale divides the scales, which it else multiplies."""

    def read_grid(self, stored: Mapping[str, Tensor]) -> Grid:
        shape = (
            -(-self.outputs // self.rows_per_scale),
            -(-self.inputs // self.columns_per_scale),
        )
        scale_RG = read_scale(stored[SCALE]).reshape(shape)
        if (overall := stored.get(GLOBAL_SCALE)) is not None:
            factor = overall.to(torch.float32).reshape(())
            scale_RG = scale_RG / factor if self.divides else scale_RG * factor
        zero_RG = stored.get(ZERO)
        if zero_RG is not None:
            zero_RG = self.unpack_zero(zero_RG) if self.unpack_zero is not None else zero_RG
            zero_RG = zero_RG.to(torch.float32).reshape(shape)
        group_I = stored.get(GROUPS)
        if group_I is not None:
            group_I = group_I.to(torch.int64)
        return Grid(scale_RG, zero_RG, self.rows_per_scale, self.columns_per_scale, group_I)

    def read_rows(self, values: Tensor, start: int, stop: int) -> Tensor:
        return self.unpack(values[start:stop])


def fit_scale(
    shape: tuple[int, int], scale: Sequence[int], blocks: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """Return how many rows and columns of a matrix [O, I] share a scale of the shape `scale`.

    All may, or a row's values, or those of a block of `blocks` (rows, columns), the last of which
    may be smaller. Raises `ValueError` where none fits.
    """
    outputs, inputs = shape
    if math.prod(scale) == 1:
        return shape
    padded = (*scale, 1) if len(scale) == 1 else tuple(scale)
    for rows, columns in ((1, inputs), *blocks):
        if padded == (-(-outputs // rows), -(-inputs // columns)):
            return rows, columns
    raise ValueError(
        f"a scale of shape {list(scale)} fits none of [{outputs}, {inputs}] in blocks of "
        f"{', '.join(f'{rows} x {columns}' for rows, columns in ((1, inputs), *blocks))}"
    )
