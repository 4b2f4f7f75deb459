"""Tensors as bytes on the wire: a small description and the encoded payload.

The bytes come from peers, who may be hostile: `check` bounds a description before any memory is
taken for its payload, and `decode` refuses whatever is not exactly what the description promises.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from nesa_node.core.errors import ProtocolError

MAX_DIMS = 4
MAX_DIM = 2**31 - 1
MAX_NAME = 32

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


class TensorMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describes a payload. Nothing in it can be relied on before `check` accepted it."""

    dtype: str
    shape: tuple[int, ...]
    codec: str = "none"

    @property
    def nbytes(self) -> int:
        """Bytes of the encoded payload. Raises `ProtocolError("bad_tensor")` as `check` does."""
        return _codec_of(self).nbytes(self)


class Codec(Protocol):
    """One way to write a tensor's values as bytes. Lossy ones state their error bound."""

    def nbytes(self, meta: TensorMeta) -> int: ...

    def encode(self, tensor: Tensor) -> memoryview:
        """`tensor`: contiguous, on the CPU, of a dtype in `DTYPES`."""
        ...

    def decode(self, meta: TensorMeta, data: memoryview) -> Tensor:
        """`data` has exactly `nbytes(meta)` bytes; the result has the meta's dtype and shape."""
        ...


class RawCodec:
    """The values themselves, little-endian, row-major. Exact."""

    def nbytes(self, meta: TensorMeta) -> int:
        return math.prod(meta.shape) * DTYPES[meta.dtype].itemsize

    def encode(self, tensor: Tensor) -> memoryview:
        # With cold caches a call into torch takes 20 us and more, so this makes one or two.
        plain = tensor.view(torch.int16) if tensor.dtype.itemsize == 2 else tensor
        array = plain.numpy()
        return array.data.cast("B") if array.size else memoryview(b"")

    def decode(self, meta: TensorMeta, data: memoryview) -> Tensor:
        dtype = DTYPES[meta.dtype]
        if not data.nbytes:
            return torch.empty(meta.shape, dtype=dtype)
        # `frombuffer` shares memory and warns about buffers that cannot be written to.
        writable = bytearray(data) if data.readonly else data
        return torch.frombuffer(writable, dtype=dtype).view(meta.shape)


CODECS: Mapping[str, Codec] = {"none": RawCodec()}


def encode(tensor: Tensor, *, codec: str = "none") -> tuple[TensorMeta, memoryview]:
    """Describe and encode a float32, float16 or bfloat16 tensor of at most `MAX_DIMS` dimensions.

    The view shares the memory of a contiguous CPU tensor and keeps it alive: do not write to the
    tensor while the view is in use. Other tensors are copied. Values are not checked here.
    """
    if sys.byteorder != "little":  # pragma: no cover
        raise ProtocolError("bad_tensor", "tensors travel little-endian; this machine is not")
    if tensor.dtype not in DTYPE_NAMES:
        raise ProtocolError("bad_tensor", f"a {tensor.dtype} tensor cannot be sent")
    meta = TensorMeta(dtype=DTYPE_NAMES[tensor.dtype], shape=tuple(tensor.shape), codec=codec)
    if tensor.requires_grad or not tensor.is_cpu or not tensor.is_contiguous():
        tensor = tensor.detach().cpu().contiguous()
    return meta, _codec_of(meta).encode(tensor)


def check(meta: TensorMeta, *, max_bytes: int) -> int:
    """Return the payload's size in bytes. Raises `ProtocolError("bad_tensor")`.

    Call it before reading the payload: an accepted description needs at most `max_bytes`.
    """
    return _bounded(meta.nbytes, max_bytes)


def decode(meta: TensorMeta, data: bytes | bytearray | memoryview, *, max_bytes: int) -> Tensor:
    """Return the tensor that `encode` described, on the CPU.

    A writable `data` becomes the tensor's memory (do not reuse it); a read-only one is copied.
    Raises `ProtocolError("bad_tensor")` for an unknown codec or dtype, a shape out of bounds or a
    payload of another size, and `ProtocolError("not_finite")` for NaN or infinite values.
    """
    codec = _codec_of(meta)
    nbytes = _bounded(codec.nbytes(meta), max_bytes)
    view = memoryview(data).cast("B")
    if view.nbytes != nbytes:
        raise ProtocolError(
            "bad_tensor", f"{meta.dtype}{list(meta.shape)} takes {nbytes} bytes, got {view.nbytes}"
        )
    tensor = codec.decode(meta, view)
    if not is_finite(tensor):
        raise ProtocolError("not_finite", "the tensor holds NaN or infinite values")
    return tensor


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    # On event loops, where `isfinite` would take 30 times as long. A sum is finite only if all
    # values are; where it overflows the extremes tell: both are NaN if any value is.
    if math.isfinite(tensor.sum().item()):
        return True
    return all(math.isfinite(end.item()) for end in torch.aminmax(tensor))


def _bounded(nbytes: int, max_bytes: int) -> int:
    if nbytes > max_bytes:
        raise ProtocolError("bad_tensor", f"a tensor of {nbytes} bytes; at most {max_bytes} fit")
    return nbytes


def _codec_of(meta: TensorMeta) -> Codec:
    codec = CODECS.get(meta.codec)
    if codec is None:
        raise ProtocolError("bad_tensor", f"unknown codec {meta.codec[:MAX_NAME]!r}")
    if meta.dtype not in DTYPES:
        raise ProtocolError("bad_tensor", f"unknown dtype {meta.dtype[:MAX_NAME]!r}")
    if len(meta.shape) > MAX_DIMS:
        raise ProtocolError("bad_tensor", f"{len(meta.shape)} dimensions; at most {MAX_DIMS}")
    if meta.shape and not 0 <= min(meta.shape) <= max(meta.shape) <= MAX_DIM:
        raise ProtocolError("bad_tensor", f"dimensions must be 0 to {MAX_DIM}")
    return codec
