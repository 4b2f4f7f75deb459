"""Hidden states in a node, as received bytes or as a torch tensor, converted on demand.

T packed tokens, D hidden.
"""

from __future__ import annotations

import ctypes
import math
from typing import NamedTuple

import torch
from torch import Tensor

from nesa_node.compression.codec import (
    DTYPE_NAMES,
    DTYPES,
    copy_small_tensor,
    is_finite,
    is_finite_payload,
)
from nesa_node.compression.tensors import TensorMeta, check_values, decode, encode, is_small


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
