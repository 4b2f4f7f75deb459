"""The codec protocol, the codec `none`, and what codecs share: dtypes, finite values, rounding."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from nesa_node.core.errors import ProtocolError

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
FLOAT16_MAX = 65504.0

MIN_BLOCK_ABSMAX = 2.0**-100
"""Blocks with a smaller largest |value| become zeros: subnormal quotients are too coarse."""

_MAX_COPIED_BYTES = 16 * 1024
"""Tensors up to this size are copied and checked without torch, whose calls take 20 to 60 us with
cold caches."""

_NON_FINITE_BITS: Mapping[torch.dtype, tuple[Any, int, int]] = {
    torch.float32: (np.uint32, 0x7FFF_FFFF, 0x7F80_0000),
    torch.bfloat16: (np.uint16, 0x7FFF, 0x7F80),
    torch.float16: (np.uint16, 0x7FFF, 0x7C00),
}
"""Per dtype: integer type of the same width, mask without the sign, least bits of inf and NaN."""


class TensorLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fields of `TensorMeta`, which adds what needs the registry of codecs."""

    dtype: str
    shape: tuple[int, ...]
    codec: str = "none"
    size: int | msgspec.UnsetType = msgspec.UNSET
    """Bytes of the payload if they depend on the values (`lossless`); else not on the wire."""


class Codec(Protocol):
    """An encoding of a tensor's values as bytes.

    Decoding does the same elementwise float32 operations in the same order on every device, so that
    the values are equal on all. Encoding runs on the tensor's device.
    """

    @property
    def text(self) -> str:
        """Name and parameters on the wire; `parse(text)` returns an equal codec."""
        ...

    def nbytes(self, meta: TensorLayout) -> int:
        """The payload's size in bytes. The shape must be within bounds and not empty.

        Raises `ProtocolError("bad_tensor")` for an impossible announced size.
        """
        ...

    def encode(self, tensor: Tensor) -> memoryview:
        """Encode `tensor`, contiguous, not empty, of a dtype in `DTYPES`; it is not modified.

        All codecs but `none` raise `ProtocolError("not_finite")` for NaN and infinities, and
        `ProtocolError("bad_tensor")` for values outside their range.
        """
        ...

    def decode(self, meta: TensorLayout, data: memoryview, device: torch.device) -> Tensor:
        """Decode `data` of exactly `nbytes(meta)` bytes to a tensor of the meta's dtype and shape.

        Raises `ProtocolError("bad_tensor")` for bytes that `encode` cannot have written.
        """
        ...


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


def is_finite_payload(values: bytes | bytearray | memoryview, dtype: torch.dtype) -> bool:
    """Whether no value in these bytes (at least one value) is NaN or infinite.

    The first check is in pure Python: with cold caches numpy takes 20 us, and torch more.
    """
    if dtype is not torch.float16:
        ends = bytes(values)[dtype.itemsize - 1 :: dtype.itemsize]
        # The upper byte: sign and seven exponent bits. All seven set means |value| > 1e38 or so.
        if 0x7F not in ends and 0xFF not in ends:
            return True
    # inf and NaN have all exponent bits set, finite values do not.
    of_bits, without_sign, least = _NON_FINITE_BITS[dtype]
    magnitudes = np.frombuffer(values, of_bits) & of_bits(without_sign)
    return bool(magnitudes.max() < least)


def copy_small_tensor(tensor: Tensor) -> bytes | None:
    """A copy of the bytes of a small, non-empty, contiguous CPU tensor, else None."""
    if 0 < tensor.nbytes <= _MAX_COPIED_BYTES and tensor.is_cpu and tensor.is_contiguous():
        return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
    return None


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    brief = copy_small_tensor(tensor) if tensor.dtype in _NON_FINITE_BITS else None
    if brief is not None:
        return is_finite_payload(brief, tensor.dtype)
    # `isfinite` would take 30 times as long, on an event loop. A sum is finite only if all values
    # are; if it overflows, the extremes decide: both are NaN if any value is.
    if math.isfinite(tensor.sum().item()):
        return True
    return all(math.isfinite(end.item()) for end in torch.aminmax(tensor))


def require_finite(tensor: Tensor) -> None:
    """Raise `ProtocolError("not_finite")` if `tensor` holds NaN or infinite values."""
    if not is_finite(tensor):
        raise not_finite_error()


def not_finite_error() -> ProtocolError:
    return ProtocolError("not_finite", "the tensor holds NaN or infinite values")


def round_to_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 values to `dtype`; for float16 they are clamped to its range.

    The original was finite in `dtype`, so that clamping an approximation reduces its error.
    """
    if dtype == torch.float16:
        values = values.clamp(-FLOAT16_MAX, FLOAT16_MAX)
    return values.to(dtype)


def concat_bytes(*parts: Tensor) -> memoryview:
    """The concatenated bytes of contiguous tensors, on the CPU."""
    # 16-bit floats are viewed as bytes: numpy has no bfloat16.
    flat = [part.reshape(-1).view(torch.uint8).cpu() for part in parts]
    joined = flat[0] if len(flat) == 1 else torch.cat(flat)
    return joined.numpy().data


def read_values(data: memoryview, offset: int, count: int, dtype: torch.dtype) -> Tensor:
    """`count` values that begin at byte `offset`, as a CPU tensor that shares memory with `data`.

    Do not write to it. `data` must be writable, or `frombuffer` warns. Alignment is not needed.
    """
    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=offset)
