"""Codecs that write values in a dtype, little-endian, row-major; `none` writes them unchanged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from nesa_node.compression.codec import DTYPES

if TYPE_CHECKING:
    from nesa_node.compression.tensors import TensorMeta


@dataclass(frozen=True, slots=True)
class RawCodec:
    """The exact codec; the only one that does not check values when encoding."""

    text: ClassVar[str] = "none"
    exact: ClassVar[bool] = True

    def nbytes(self, meta: TensorMeta) -> int:
        return math.prod(meta.shape) * DTYPES[meta.dtype].itemsize

    def encode(self, tensor: Tensor) -> memoryview:
        # A call into torch takes 20 us and more with cold caches, so few are made.
        if not tensor.is_cpu:
            tensor = tensor.cpu()
        plain = tensor.view(torch.int16) if tensor.dtype.itemsize == 2 else tensor
        array = plain.numpy()
        return array.data.cast("B") if array.size else memoryview(b"")

    def decode(self, meta: TensorMeta, data: memoryview, device: torch.device) -> Tensor:
        dtype = DTYPES[meta.dtype]
        if not data.nbytes:
            return torch.empty(meta.shape, dtype=dtype, device=device)
        # `frombuffer` shares memory and warns about read-only buffers.
        writable = bytearray(data) if data.readonly else data
        tensor = torch.frombuffer(writable, dtype=dtype).view(meta.shape)
        return tensor if device.type == "cpu" else tensor.to(device)

    def error_bound(self, tensor: Tensor) -> Tensor:
        """Zeros, float64: the codec is exact."""
        return torch.zeros_like(tensor, dtype=torch.float64)
