"""What every codec offers, and what all share: dtypes, finite values, rounding to a dtype."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from nesa_node.core.errors import ProtocolError

if TYPE_CHECKING:
    from nesa_node.compression.tensors import TensorMeta

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
FLOAT16_MAX = 65504.0

SMALLEST = 2.0**-100
"""Blocks with no larger value become zeros: quotients of subnormal numbers would be too coarse."""

_BRIEF_BYTES = 16 * 1024
"""Up to so many are copied rather than looked at with torch, of which a call takes 20 to 60 us with
cold caches."""

_NOT_FINITE: Mapping[torch.dtype, tuple[Any, int, int]] = {
    torch.float32: (np.uint32, 0x7FFF_FFFF, 0x7F80_0000),
    torch.bfloat16: (np.uint16, 0x7FFF, 0x7F80),
    torch.float16: (np.uint16, 0x7FFF, 0x7C00),
}
"""An integer as wide, all bits but the sign, and the least of those that stand for no number."""

_ROUNDING: Mapping[torch.dtype, tuple[float, float]] = {
    torch.float32: (2.0**-24, 2.0**-150),
    torch.float16: (2.0**-11, 2.0**-25),
    torch.bfloat16: (2.0**-8, 2.0**-134),
}


class Codec(Protocol):
    """One way to write a tensor's values as bytes.

    Decoding does the same elementwise float32 operations in the same order on every device, so that
    all get the same values. Encoding is done where the tensor is.
    """

    @property
    def text(self) -> str:
        """Its name and parameters as they travel: `parse(text)` is this codec again."""
        ...

    @property
    def exact(self) -> bool:
        """Whether `decode` returns the very values that were encoded, whatever they are."""
        ...

    def nbytes(self, meta: TensorMeta) -> int:
        """The payload's size. The shape is within bounds and not empty.

        Raises `ProtocolError("bad_tensor")` for an announced size that cannot be.
        """
        ...

    def encode(self, tensor: Tensor) -> memoryview:
        """`tensor`: contiguous, not empty, of a dtype in `DTYPES`; not modified.

        All but `none` raise `ProtocolError("not_finite")` for NaN and infinities, and
        `ProtocolError("bad_tensor")` for values that they cannot write.
        """
        ...

    def decode(self, meta: TensorMeta, data: memoryview, device: torch.device) -> Tensor:
        """`data` has exactly `nbytes(meta)` bytes; the result has the meta's dtype and shape.

        Raises `ProtocolError("bad_tensor")` for bytes that `encode` would not have written.
        """
        ...

    def error_bound(self, tensor: Tensor) -> Tensor:
        """For each value of a finite `tensor` that can be encoded, the largest |decoded - value|.

        float64, of the tensor's shape. It includes the rounding to the tensor's dtype.
        """
        ...


def are_finite(values: bytes | bytearray | memoryview, dtype: torch.dtype) -> bool:
    """Whether no value of these bytes, one at least, is NaN or infinite.

    With cold caches numpy takes 20 us for it, and torch more.
    """
    if dtype is not torch.float16:
        ends = bytes(values)[dtype.itemsize - 1 :: dtype.itemsize]
        # A sign and seven bits of the exponent. Values with all seven are beyond 1e38 at least.
        if 0x7F not in ends and 0xFF not in ends:
            return True
    # Those have all bits of the exponent set, and no number has.
    of_bits, without_sign, least = _NOT_FINITE[dtype]
    magnitudes = np.frombuffer(values, of_bits) & of_bits(without_sign)
    return bool(magnitudes.max() < least)


def brief_bytes(tensor: Tensor) -> bytes | None:
    """A copy of a tensor's bytes, if they are few, not none, and lie together on the CPU."""
    if 0 < tensor.nbytes <= _BRIEF_BYTES and tensor.is_cpu and tensor.is_contiguous():
        return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
    return None


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    brief = brief_bytes(tensor) if tensor.dtype in _NOT_FINITE else None
    if brief is not None:
        return are_finite(brief, tensor.dtype)
    # On event loops, where `isfinite` would take 30 times as long. A sum is finite only if all
    # values are; where it overflows the extremes tell: both are NaN if any value is.
    if math.isfinite(tensor.sum().item()):
        return True
    return all(math.isfinite(end.item()) for end in torch.aminmax(tensor))


def require_finite(tensor: Tensor) -> None:
    """`tensor`: the values, or maxima that are not finite if any value is not."""
    if not is_finite(tensor):
        raise ProtocolError("not_finite", "the tensor holds NaN or infinite values")


def round_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 values to `dtype`, into what float16 can hold if that is asked for.

    The original was finite in `dtype`, so an approximation beyond it only gets closer.
    """
    if dtype == torch.float16:
        values = values.clamp(-FLOAT16_MAX, FLOAT16_MAX)
    return values.to(dtype)


def rounded_bound(tensor: Tensor, bound: Tensor) -> Tensor:
    """`bound` on float32 values (float64), and what rounding these to `tensor`'s dtype adds.

    Half a unit in the last place: |decoded| 2^-24, 2^-11 or 2^-8, or half the smallest number.
    """
    relative, smallest = _ROUNDING[tensor.dtype]
    return bound + (tensor.detach().double().abs() + bound) * relative + smallest


def payload_of(*parts: Tensor) -> memoryview:
    """The bytes of contiguous tensors, one after another, on the CPU."""
    # Bytes of 16-bit floats are taken by way of integers: numpy has no bfloat16.
    flat = [part.reshape(-1).view(torch.uint8).cpu() for part in parts]
    joined = flat[0] if len(flat) == 1 else torch.cat(flat)
    return joined.numpy().data


def part_of(data: memoryview, start: int, count: int, dtype: torch.dtype) -> Tensor:
    """`count` values that begin at byte `start`, on the CPU. Not to be written to.

    `data` is writable, or `frombuffer` warns. Values need not be aligned.
    """
    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=start)
