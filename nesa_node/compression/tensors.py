"""Tensors on the wire: a small description (`TensorMeta`) and the encoded payload.

The bytes come from untrusted peers: `check` bounds a description before memory is allocated for its
payload, and `decode` refuses payloads that do not match their description.

T packed tokens, D hidden.
"""

from __future__ import annotations

import ctypes
import math
import sys
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from nesa_node.compression.codec import (
    DTYPE_NAMES,
    DTYPES,
    Codec,
    TensorLayout,
    copy_small_tensor,
    is_finite,
    is_finite_payload,
    not_finite_error,
    require_finite,
)
from nesa_node.compression.codecs import RAW, expand_codec, parse_codec
from nesa_node.core.errors import ProtocolError

__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "MAX_DIM",
    "MAX_DIMS",
    "TensorMeta",
    "check_meta",
    "decode",
    "encode",
    "is_finite",
]

MAX_DIMS = 4
MAX_DIM = 2**31 - 1
MAX_SHOWN_CHARS = 32
MAX_SMALL_BYTES = 64 * 1024
"""Payloads of codec `none` up to this size are checked as bytes, which is slower above."""
_CPU = torch.device("cpu")


class TensorMeta(TensorLayout, frozen=True, forbid_unknown_fields=True):
    """Description of a payload; untrusted until accepted by `check`."""

    @property
    def nbytes(self) -> int:
        """Bytes of the encoded payload. Raises `ProtocolError("bad_tensor")` as `check` does."""
        return _payload_nbytes(_check_codec(self), self)

    @property
    def max_nbytes(self) -> int:
        """Bytes of the payload or of the decoded tensor, the larger, as bounded by `check`.

        Raises `ProtocolError("bad_tensor")` as `check` does.
        """
        return max(self.nbytes, self.decoded_nbytes)

    @property
    def decoded_nbytes(self) -> int:
        """Bytes of the decoded tensor. Raises `ProtocolError("bad_tensor")` as `check` does."""
        _check_codec(self)
        return RAW.nbytes(self)


def encode(tensor: Tensor, *, codec: str = "none") -> tuple[TensorMeta, memoryview]:
    """Describe and encode a float32, float16 or bfloat16 tensor of at most `MAX_DIMS` dimensions.

    With `none` the view shares the memory of a contiguous CPU tensor and keeps it alive: do not
    write to the tensor while the view is in use. Other tensors are copied. `none` does not check
    the values; other codecs raise `ProtocolError("not_finite")` for NaN and infinities, and
    `ProtocolError("bad_tensor")` for values outside their range.
    """
    if sys.byteorder != "little":  # pragma: no cover
        raise ProtocolError("bad_tensor", "tensors travel little-endian; this machine is not")
    if tensor.dtype not in DTYPE_NAMES:
        raise ProtocolError("bad_tensor", f"a {tensor.dtype} tensor cannot be sent")
    text = codec if codec == "none" else expand_codec(codec)
    meta = TensorMeta(dtype=DTYPE_NAMES[tensor.dtype], shape=tuple(tensor.shape), codec=text)
    chosen = _check_codec(meta)
    if tensor.requires_grad or not tensor.is_contiguous():
        tensor = tensor.detach().contiguous()
    if chosen is RAW:
        return meta, RAW.encode(tensor)
    payload = chosen.encode(tensor) if tensor.numel() else memoryview(b"")
    size = payload.nbytes if chosen.text == "lossless" else msgspec.UNSET
    return TensorMeta(meta.dtype, meta.shape, chosen.text, size), payload


def check_meta(meta: TensorMeta, *, max_bytes: int) -> int:
    """The payload's size in bytes. Raises `ProtocolError("bad_tensor")`.

    Call it before reading the payload: with an accepted description neither the payload nor the
    decoded tensor exceeds `max_bytes`.
    """
    return _check_bounds(_check_codec(meta), meta, max_bytes)


def decode(
    meta: TensorMeta,
    data: bytes | bytearray | memoryview,
    *,
    max_bytes: int,
    device: torch.device = _CPU,
) -> Tensor:
    """The tensor that `encode` described, on `device`, with the same values on every device.

    A writable `data` may become the tensor's memory (do not reuse it); a read-only one is copied.
    `max_bytes` bounds the payload and the tensor, as in `check`.
    Raises `ProtocolError("bad_tensor")` for an unknown codec or dtype, a shape out of bounds or a
    payload of another size, and `ProtocolError("not_finite")` for NaN or infinite values.
    """
    view = memoryview(data).cast("B")
    if is_small(meta, view):
        check_values(meta, view, max_bytes=max_bytes)
        return RAW.decode(meta, view, device)
    codec = _check_size(meta, view.nbytes, max_bytes)
    if codec is RAW:
        tensor = RAW.decode(meta, view, device)
    elif view.nbytes:
        # torch warns about read-only buffers.
        view = memoryview(bytearray(view)) if view.readonly else view
        tensor = codec.decode(meta, view, device)
    else:
        tensor = torch.empty(meta.shape, dtype=DTYPES[meta.dtype], device=device)
    require_finite(tensor)
    return tensor


def is_small(meta: TensorMeta, data: bytes | bytearray | memoryview) -> bool:
    """Whether `data` is a small, non-empty payload of codec `none`, as `check_values` needs."""
    return meta.codec == RAW.text and 0 < len(data) <= MAX_SMALL_BYTES


def check_values(meta: TensorMeta, data: bytes | bytearray | memoryview, *, max_bytes: int) -> None:
    """Raise `ProtocolError` as `decode` does, without making a tensor."""
    _check_size(meta, len(data), max_bytes)
    if not is_finite_payload(data, DTYPES[meta.dtype]):
        raise not_finite_error()


def _check_size(meta: TensorMeta, got: int, max_bytes: int) -> Codec:
    codec = _check_codec(meta)
    nbytes = _check_bounds(codec, meta, max_bytes)
    if got != nbytes:
        raise ProtocolError(
            "bad_tensor", f"{meta.dtype}{list(meta.shape)} takes {nbytes} bytes, got {got}"
        )
    return codec


def _check_bounds(codec: Codec, meta: TensorMeta, max_bytes: int) -> int:
    nbytes = _payload_nbytes(codec, meta)
    # A small payload can describe a large tensor, so that both are bounded.
    needed = nbytes if codec is RAW else max(nbytes, RAW.nbytes(meta))
    if needed > max_bytes:
        raise ProtocolError("bad_tensor", f"a tensor of {needed} bytes; at most {max_bytes} fit")
    return nbytes


def _payload_nbytes(codec: Codec, meta: TensorMeta) -> int:
    if codec is RAW:
        return RAW.nbytes(meta)
    if math.prod(meta.shape):
        return codec.nbytes(meta)
    return 0


def _check_codec(meta: TensorMeta) -> Codec:
    codec: Codec = RAW if meta.codec == "none" else parse_codec(meta.codec)
    if meta.size is not msgspec.UNSET and codec.text != "lossless":
        raise ProtocolError("bad_tensor", f"codec {codec.text} announces no size")
    if meta.dtype not in DTYPES:
        raise ProtocolError("bad_tensor", f"unknown dtype {meta.dtype[:MAX_SHOWN_CHARS]!r}")
    if len(meta.shape) > MAX_DIMS:
        raise ProtocolError("bad_tensor", f"{len(meta.shape)} dimensions; at most {MAX_DIMS}")
    if meta.shape and not 0 <= min(meta.shape) <= max(meta.shape) <= MAX_DIM:
        raise ProtocolError("bad_tensor", f"dimensions must be 0 to {MAX_DIM}")
    return codec


class BufferRange(NamedTuple):
    """A range of this process's memory, in bytes."""

    address: int
    nbytes: int

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> BufferRange:
        """The memory of a contiguous CPU tensor, which the caller must keep alive."""
        return cls(tensor.data_ptr(), tensor.nbytes)


class HiddenStates:
    """Values [T, D] as bytes and as a tensor, which share memory on the CPU unless small.

    The missing form is made on demand: with cold caches either takes 20 us, as long as a small
    matrix product. Compiled steps use `buffer_range` and need neither.
    """

    __slots__ = ("_payload", "_tensor_TD", "dtype", "meta", "nbytes")

    def __init__(
        self,
        meta: TensorMeta,
        payload: bytearray | memoryview | None = None,
        tensor_TD: Tensor | None = None,
    ) -> None:
        """Pass `payload`, not empty and of the size in `meta`, or a contiguous `tensor_TD`."""
        self.meta = meta
        self.dtype = DTYPES[meta.dtype]
        self.nbytes = math.prod(meta.shape) * self.dtype.itemsize
        self._payload = payload
        self._tensor_TD = tensor_TD

    @classmethod
    def from_tensor(cls, tensor_TD: Tensor) -> HiddenStates:
        """Hidden states of a tensor on any device; it must not be written to afterwards."""
        if tensor_TD.requires_grad or not tensor_TD.is_contiguous():
            tensor_TD = tensor_TD.detach().contiguous()
        return cls(_raw_meta(tensor_TD.shape, tensor_TD.dtype), None, tensor_TD)

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: torch.dtype) -> HiddenStates:
        """Zeros, which the caller fills before sharing the object."""
        return cls(_raw_meta(shape, dtype), bytearray(math.prod(shape) * dtype.itemsize))

    @classmethod
    def from_payload(
        cls, meta: TensorMeta, payload: bytearray | memoryview, *, max_bytes: int
    ) -> HiddenStates:
        """Decode and check a peer's payload. Raises `ProtocolError` as `decode` does."""
        if is_small(meta, payload):
            check_values(meta, payload, max_bytes=max_bytes)
            return cls(meta, payload)
        return cls.from_tensor(decode(meta, payload, max_bytes=max_bytes))

    @property
    def is_finite(self) -> bool:
        """Whether no value is NaN or infinite."""
        if self._payload is not None:
            return is_finite_payload(self._payload, self.dtype)
        return is_finite(self.tensor_TD)

    @property
    def num_tokens(self) -> int:
        return self.meta.shape[0]

    @property
    def payload(self) -> bytearray | memoryview:
        """The values as encoded by codec `none`."""
        if self._payload is None:
            assert self._tensor_TD is not None
            brief = copy_small_tensor(self._tensor_TD)
            if brief is not None:
                self._payload = bytearray(brief)
            else:
                _, self._payload = encode(self._tensor_TD)
        return self._payload

    @property
    def tensor_TD(self) -> Tensor:
        if self._tensor_TD is None:
            assert self._payload is not None
            flat = torch.frombuffer(self._payload, dtype=self.dtype)
            self._tensor_TD = flat.view(self.meta.shape)
        return self._tensor_TD

    def buffer_range(self, start: int, end: int) -> BufferRange:
        """The CPU memory of the tokens `start:end`, valid while this object lives."""
        row_bytes = self.nbytes // self.num_tokens
        if self._tensor_TD is not None:
            first = self._tensor_TD.data_ptr()
        else:
            assert self._payload is not None
            first = ctypes.addressof(ctypes.c_char.from_buffer(self._payload))
        return BufferRange(first + start * row_bytes, (end - start) * row_bytes)


def _raw_meta(shape: tuple[int, ...], dtype: torch.dtype) -> TensorMeta:
    return TensorMeta(dtype=DTYPE_NAMES[dtype], shape=tuple(shape))
