"""Weights in 2 to 8 bits as the library compressed-tensors writes them (llm-compressor, vLLM).

O outputs, I inputs, G groups of inputs, W words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from nesa_node.engine.weights.files import TensorInfo
from nesa_node.engine.weights.formats.quantized_tensor import (
    FLOAT8,
    GROUPS,
    SCALE,
    VALUES,
    ZERO,
    Grid,
    QuantizedTensor,
    RowLayout,
    unpack_integers,
)
from nesa_node.engine.weights.formats.small_floats import describe_float4
from nesa_node.engine.weights.formats.stored_format import (
    PLAIN_DTYPES,
    StoredTensors,
    describe_scaled,
)

PACKED_BITS = (2, 4, 8)
_SHAPE = "shape"


@dataclass(frozen=True, slots=True)
class PackedScheme:
    """Integers of `bits` bits in 32-bit words, the first in the lowest bits of each."""

    bits: int
    group_size: int | None
    """Inputs that share a scale; None: all of a row do."""


def _unpack_signed(packed: Tensor, *, bits: int) -> Tensor:
    """Words [..., W] to integers [..., 32 / bits * W], which are stored plus half their range."""
    return unpack_integers(packed, bits).to(torch.float32).sub_(2 ** (bits - 1))


def _unpack_columns(packed: Tensor, *, bits: int, outputs: int) -> Tensor:
    """Zero points [W, G], whose words hold those of successive outputs, to [O, G]."""
    return _unpack_signed(packed.T, bits=bits)[:, :outputs].T


@dataclass(frozen=True, slots=True)
class _PackedLayout:
    """Rows of packed integers. The shape that is stored beside them has to be theirs."""

    rows: RowLayout

    def read_grid(self, stored: Mapping[str, Tensor]) -> Grid:
        if (told := stored[_SHAPE].tolist()) != [self.rows.outputs, self.rows.inputs]:
            raise ValueError(
                f"its weight_shape is {told}, and its words hold "
                f"{[self.rows.outputs, self.rows.inputs]}"
            )
        return self.rows.read_grid(stored)

    def read_rows(self, values: Tensor, start: int, stop: int) -> Tensor:
        return self.rows.read_rows(values, start, stop)


@dataclass(frozen=True, slots=True)
class CompressedFormat:
    """Files of compressed-tensors: each tensor's name and dtype say how it is stored."""

    packed: tuple[PackedScheme, ...]
    blocks: tuple[tuple[int, int], ...] = field(default=())
    """Rows and columns that share a scale, of weights that are not packed."""

    def describe(self, stored: StoredTensors) -> Iterator[QuantizedTensor]:
        for name, info in stored.infos.items():
            if name.endswith(".weight_packed"):
                path = name.removesuffix(".weight_packed")
                if info.dtype == torch.uint8:
                    yield describe_float4(stored, path)
                else:
                    yield self._describe_packed(stored, path)
            elif name.endswith(".weight") and f"{name}_scale" in stored.infos:
                if info.dtype not in (*FLOAT8, torch.int8):
                    raise ValueError(
                        f"{name} is {str(info.dtype).removeprefix('torch.')} beside a scale, and "
                        "so not compressed; save the model compressed"
                    )
                yield describe_scaled(stored, name, f"{name}_scale", self.blocks)

    def _describe_packed(self, stored: StoredTensors, path: str) -> QuantizedTensor:
        values = stored.require(f"{path}.weight_packed", (torch.int32,))
        scale = stored.require(f"{path}.weight_scale", PLAIN_DTYPES, (0, 1, 2))
        told = stored.require(f"{path}.weight_shape", (torch.int32, torch.int64), (1,))
        groups = stored.find(f"{path}.weight_g_idx", (torch.int32, torch.int64), (1,))
        zero_name = f"{path}.weight_zero_point"
        zero = stored.find(zero_name, (torch.int32, torch.int8), (0, 1, 2))
        scheme, size = self._choose(path, values, scale, groups)
        outputs, inputs = values.shape[0], values.shape[1] * 32 // scheme.bits
        unpack_zero = None
        if zero is not None and zero.dtype == torch.int32:
            unpack_zero = partial(_unpack_columns, bits=scheme.bits, outputs=outputs)
            zero_shape: tuple[int, ...] = (-(-outputs * scheme.bits // 32), -(-inputs // size))
        else:
            zero_shape = scale.shape
        if told.shape != (2,) or (zero is not None and zero.shape != zero_shape):
            raise ValueError(f"{path} has a shape or zero points of another size than its weight")
        parts = {VALUES: values, SCALE: scale, _SHAPE: told}
        parts |= {} if zero is None else {ZERO: zero}
        parts |= {} if groups is None else {GROUPS: groups}
        unpack = partial(_unpack_signed, bits=scheme.bits)
        per_scale = outputs if scale.numel == 1 else 1
        rows = RowLayout(outputs, inputs, per_scale, size, unpack, unpack_zero)
        dtype, shape = stored.choose_dtype(scale), (outputs, inputs)
        return QuantizedTensor(f"{path}.weight", shape, dtype, parts, _PackedLayout(rows))

    def _choose(
        self, path: str, values: TensorInfo, scale: TensorInfo, groups: TensorInfo | None
    ) -> tuple[PackedScheme, int]:
        """The one scheme of the config that its tensors' shapes fit, and the size of groups."""
        fitting = {}
        for scheme in self.packed:
            outputs, inputs = values.shape[0], values.shape[1] * 32 // scheme.bits
            size = scheme.group_size or inputs
            count = -(-inputs // size)
            shapes = [(outputs, count)] + ([(outputs,), (1,), ()] if count == 1 else [])
            if scale.shape in shapes and (groups is None or groups.shape == (inputs,)):
                fitting[scheme] = size
        if len(fitting) != 1:
            raise ValueError(
                f"{path} has weight_packed{list(values.shape)} and weight_scale"
                f"{list(scale.shape)}, which {'several' if fitting else 'none'} of its config's "
                "schemes fit"
            )
        return next(iter(fitting.items()))
