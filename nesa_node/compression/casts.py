"""Codecs `bfloat16` and `float16`: values rounded to 16 bits, little-endian, row-major."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from nesa_node.compression.codec import (
    DTYPES,
    is_finite,
    part_of,
    payload_of,
    require_finite,
    round_to,
    rounded_bound,
)
from nesa_node.core.errors import ProtocolError

if TYPE_CHECKING:
    from nesa_node.compression.tensors import TensorMeta


@dataclass(frozen=True, slots=True)
class Cast:
    """`bfloat16` and `float16`: values rounded to nearest, ties to even.

    Exact only for tensors of the same dtype.

    Values that would become infinite are refused (`bad_tensor`): beyond 65,504 in float16, within
    0.2 % of float32's largest in bfloat16.
    """

    text: Literal["bfloat16", "float16"]

    @property
    def exact(self) -> bool:
        return False

    def nbytes(self, meta: TensorMeta) -> int:
        return 2 * math.prod(meta.shape)

    def encode(self, tensor: Tensor) -> memoryview:
        cast = tensor.to(DTYPES[self.text])
        if not is_finite(cast):
            require_finite(tensor)
            raise ProtocolError(
                "bad_tensor", f"a value of {tensor.abs().max().item():g} does not fit {self.text}"
            )
        return payload_of(cast)

    def decode(self, meta: TensorMeta, data: memoryview, device: torch.device) -> Tensor:
        cast = part_of(data, 0, math.prod(meta.shape), DTYPES[self.text]).to(device)
        dtype = DTYPES[meta.dtype]
        if cast.dtype == dtype:
            return cast.view(meta.shape)
        return round_to(cast.float(), dtype).view(meta.shape)

    def error_bound(self, tensor: Tensor) -> Tensor:
        """|value| 2^-8 in bfloat16, |value| 2^-11 + 2^-25 in float16; at most two roundings."""
        if tensor.dtype == DTYPES[self.text]:
            return torch.zeros_like(tensor, dtype=torch.float64)
        zero = torch.zeros_like(tensor, dtype=torch.float64)
        cast = rounded_bound(tensor.to(DTYPES[self.text]), zero)
        return rounded_bound(tensor, cast)
