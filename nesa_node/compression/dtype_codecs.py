"""Codecs that write values in a dtype, little-endian, row-major; `none` writes them unchanged.

Codecs `bfloat16` and `float16`: values rounded to 16 bits, little-endian, row-major.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from nesa_node.compression.codec import (
    DTYPES,
    TensorLayout,
    concat_bytes,
    is_finite,
    read_values,
    require_finite,
    round_to_dtype,
)
from nesa_node.core.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class RawCodec:
    """The exact codec; the only one that does not check values when encoding."""

    text: ClassVar[str] = "none"

    def nbytes(self, meta: TensorLayout) -> int:
        return math.prod(meta.shape) * DTYPES[meta.dtype].itemsize

    def encode(self, tensor: Tensor) -> memoryview:
        # A call into torch takes 20 us and more with cold caches, so few are made.
        if not tensor.is_cpu:
            tensor = tensor.cpu()
        plain = tensor.view(torch.int16) if tensor.dtype.itemsize == 2 else tensor
        array = plain.numpy()
        return array.data.cast("B") if array.size else memoryview(b"")

    def decode(self, meta: TensorLayout, data: memoryview, device: torch.device) -> Tensor:
        dtype = DTYPES[meta.dtype]
        if not data.nbytes:
            return torch.empty(meta.shape, dtype=dtype, device=device)
        # `frombuffer` shares memory and warns about read-only buffers.
        writable = bytearray(data) if data.readonly else data
        tensor = torch.frombuffer(writable, dtype=dtype).view(meta.shape)
        return tensor if device.type == "cpu" else tensor.to(device)


@dataclass(frozen=True, slots=True)
class Cast:
    """`bfloat16` and `float16`: values rounded to nearest, ties to even.

    Exact only for tensors of the same dtype; else errors are at most |value| 2^-8 in bfloat16, and
    |value| 2^-11 + 2^-25 in float16.

    Values that would become infinite are refused (`bad_tensor`): beyond 65,504 in float16, within
    0.2 % of float32's largest in bfloat16.
    """

    text: Literal["bfloat16", "float16"]

    def nbytes(self, meta: TensorLayout) -> int:
        return 2 * math.prod(meta.shape)

    def encode(self, tensor: Tensor) -> memoryview:
        cast = tensor.to(DTYPES[self.text])
        if not is_finite(cast):
            require_finite(tensor)
            raise ProtocolError(
                "bad_tensor", f"a value of {tensor.abs().max().item():g} does not fit {self.text}"
            )
        return concat_bytes(cast)

    def decode(self, meta: TensorLayout, data: memoryview, device: torch.device) -> Tensor:
        cast = read_values(data, 0, math.prod(meta.shape), DTYPES[self.text]).to(device)
        dtype = DTYPES[meta.dtype]
        if cast.dtype == dtype:
            return cast.view(meta.shape)
        return round_to_dtype(cast.float(), dtype).view(meta.shape)
