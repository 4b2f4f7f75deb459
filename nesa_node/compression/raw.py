"""`none`: the values themselves, little-endian, row-major."""

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
    """Exact. The only one that does not look at the values when it encodes."""

    text: ClassVar[str] = "none"
    exact: ClassVar[bool] = True

    def nbytes(self, meta: TensorMeta) -> int:
        return math.prod(meta.shape) * DTYPES[meta.dtype].itemsize

    def encode(self, tensor: Tensor) -> memoryview:
        # With cold caches a call into torch takes 20 us and more, so this makes one or two.
        if not tensor.is_cpu:
            tensor = tensor.cpu()
        plain = tensor.view(torch.int16) if tensor.dtype.itemsize == 2 else tensor
        array = plain.numpy()
        return array.data.cast("B") if array.size else memoryview(b"")

    def decode(self, meta: TensorMeta, data: memoryview, device: torch.device) -> Tensor:
        dtype = DTYPES[meta.dtype]
        if not data.nbytes:
            return torch.empty(meta.shape, dtype=dtype, device=device)
        # `frombuffer` shares memory and warns about buffers that cannot be written to.
        writable = bytearray(data) if data.readonly else data
        tensor = torch.frombuffer(writable, dtype=dtype).view(meta.shape)
        return tensor if device.type == "cpu" else tensor.to(device)

    def error_bound(self, tensor: Tensor) -> Tensor:
        """Zeros."""
        return torch.zeros_like(tensor, dtype=torch.float64)
