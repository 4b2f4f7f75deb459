"""How a checkpoint holds its weights: which stored tensors each of the model's is made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from nesa_node.core.errors import CorruptCheckpointError, UnsupportedModelError
from nesa_node.engine.weights.files import TensorInfo
from nesa_node.engine.weights.formats.quantized_tensor import (
    FLOAT8,
    SCALE,
    SCALE_DTYPES,
    VALUES,
    ZERO,
    QuantizedTensor,
    RowLayout,
    fit_scale,
)

PLAIN_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_BLOCK = 1 << 20
"""Rows or columns that share a scale, more than any matrix has."""


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """Tensors of a checkpoint's files, by their names, and the dtype that the model has."""

    infos: Mapping[str, TensorInfo]
    dtype: torch.dtype | None
    taken: set[str] = field(default_factory=set)
    """Those of which weights are made."""

    def require(
        self, name: str, dtypes: Sequence[torch.dtype], dimensions: Sequence[int] = (2,)
    ) -> TensorInfo:
        """Return a tensor of one of these dtypes. Raises `ValueError`."""
        info = self.infos.get(name)
        if info is None:
            raise ValueError(f"{name} is missing")
        if info.dtype not in dtypes or len(info.shape) not in dimensions or 0 in info.shape:
            raise ValueError(f"{name} is {_describe(info)}, which its format has not")
        self.taken.add(name)
        return info

    def find(
        self, name: str, dtypes: Sequence[torch.dtype], dimensions: Sequence[int] = (2,)
    ) -> TensorInfo | None:
        """Return such a tensor; None where none has the name. Raises `ValueError`."""
        return self.require(name, dtypes, dimensions) if name in self.infos else None

    def choose_dtype(self, scale: TensorInfo) -> torch.dtype:
        """The dtype of weights once they are read: the model's, else that of their scales."""
        if self.dtype in PLAIN_DTYPES:
            return self.dtype
        return scale.dtype if scale.dtype in PLAIN_DTYPES[1:] else torch.bfloat16


def _describe(info: TensorInfo) -> str:
    return f"{str(info.dtype).removeprefix('torch.')}{list(info.shape)}"


class StoredFormat(Protocol):
    """What a `quantization_config` says, checked."""

    def describe(self, stored: StoredTensors) -> Iterator[QuantizedTensor]:
        """Yield the weights that are stored in few bits.

        Nothing is read, and no weight is larger than what it is stored in by more than the factor
        of its bits. Raises `ValueError` for tensors that do not belong together.
        """


Tensors = Mapping[str, TensorInfo | QuantizedTensor]


def map_tensors(
    stored: Mapping[str, TensorInfo],
    stored_format: StoredFormat | None,
    dtype: torch.dtype | None,
    *,
    name: str,
) -> Tensors:
    """Return a checkpoint's tensors as the model has them: `stored`, and weights made of it.

    Raises `CorruptCheckpointError` for tensors that do not belong together, and
    `UnsupportedModelError` for 8-bit floats without a scale.
    """
    made: dict[str, QuantizedTensor] = {}
    plain = stored
    if stored_format is not None:
        found = StoredTensors(stored, dtype)
        try:
            for each in stored_format.describe(found):
                if each.name in made or (each.name in stored and each.name not in found.taken):
                    raise ValueError(f"{each.name} is stored twice")
                made[each.name] = each
        except ValueError as error:
            # Tensors may have any name.
            raise CorruptCheckpointError(f"{name}: {' '.join(str(error).split()):.500}") from error
        plain = {key: info for key, info in stored.items() if key not in found.taken}
    for key, info in plain.items():
        if info.dtype in FLOAT8:
            raise UnsupportedModelError(
                f"{name}: {key!a:.200} is {_describe(info)} without a scale that its config tells "
                "of, which cannot be served; docs/checkpoints.md lists what can"
            )
    return {**plain, **made}


def describe_scaled(
    stored: StoredTensors, name: str, scale_name: str, blocks: Sequence[tuple[int, int]]
) -> QuantizedTensor:
    """A weight stored under its own name, as 8-bit floats or integers, with scales.

    Its zero points, if it has any, are stored under its name with `_zero_point` behind. Raises
    `ValueError`.
    """
    values = stored.require(name, (*FLOAT8, torch.int8), (2, 3))
    scale = stored.require(scale_name, SCALE_DTYPES, (0, 1, 2, 3))
    zero = stored.find(f"{name}_zero_point", (*PLAIN_DTYPES, *FLOAT8, torch.int8), (0, 1, 2, 3))
    experts, matrix = values.shape[:-2], (values.shape[-2], values.shape[-1])
    if (experts and scale.shape[:1] != experts) or (not experts and len(scale.shape) > 2):
        raise ValueError(f"{scale_name} is {_describe(scale)}, {name} is {_describe(values)}")
    if zero is not None and zero.shape != scale.shape:
        raise ValueError(f"the zero points of {name} have another shape than its scales")
    try:
        rows, columns = fit_scale(matrix, scale.shape[len(experts) :], blocks)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    parts = {VALUES: values, SCALE: scale} | ({} if zero is None else {ZERO: zero})
    layout = RowLayout(*matrix, rows, columns)
    return QuantizedTensor(name, values.shape, stored.choose_dtype(scale), parts, layout)
