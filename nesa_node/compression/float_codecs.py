"""Codecs that write values in a dtype, little-endian, row-major, and `lossless`."""

from __future__ import annotations

import math
import struct
import threading
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
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


ZSTD_LEVEL = 1
"""Zstandard compression level; higher ones gain nothing on such bytes."""
MAX_VALUES = 2**32 - 1
_PLANE_LENGTH = struct.Struct("<I")
_MIN_WINDOW_BYTES = 1024
_zstd_contexts = threading.local()


@dataclass(frozen=True, slots=True)
class Lossless:
    """Byte planes, each compressed by Zstandard; the tokens stay identical.

    A plane holds the bytes of equal significance of all values. Signs and exponents of hidden
    states are similar, the low bits are noise; interleaved, neither compresses.

    Payload: one plane per byte of a value, the most significant first.
    A plane is its length (4 bytes, little-endian) and that many bytes. If the length equals the
    number of values, these are the plain bytes; if it is less, they are one Zstandard frame that
    states its content size. The size depends on the values and is announced in `TensorMeta.size`.
    """

    text: ClassVar[str] = "lossless"

    def nbytes(self, meta: TensorLayout) -> int:
        """The announced size: at most the size of the values plus 4 bytes per plane."""
        values, planes = math.prod(meta.shape), DTYPES[meta.dtype].itemsize
        least, most = planes * _PLANE_LENGTH.size, planes * (_PLANE_LENGTH.size + values)
        if values > MAX_VALUES:
            raise ProtocolError("bad_tensor", f"{values} values; lossless takes {MAX_VALUES}")
        if not isinstance(meta.size, int) or not least <= meta.size <= most:
            raise ProtocolError("bad_tensor", f"a lossless size must be {least} to {most} bytes")
        return meta.size

    def encode(self, tensor: Tensor) -> memoryview:
        require_finite(tensor)
        if tensor.numel() > MAX_VALUES:
            raise ProtocolError("bad_tensor", f"{tensor.numel()} values; at most {MAX_VALUES}")
        planes = tensor.dtype.itemsize
        bytes_VP = tensor.reshape(-1).view(torch.uint8).cpu().numpy().reshape(-1, planes)
        payload = bytearray()
        for plane in reversed(range(planes)):
            plain = np.ascontiguousarray(bytes_VP[:, plane])
            packed = _compressor().compress(plain.data)
            kept = packed if len(packed) < len(plain) else plain.data
            payload += _PLANE_LENGTH.pack(len(kept))
            payload += kept
        return memoryview(payload)

    def decode(self, meta: TensorLayout, data: memoryview, device: torch.device) -> Tensor:
        dtype, values = DTYPES[meta.dtype], math.prod(meta.shape)
        bytes_VP = np.empty((values, dtype.itemsize), dtype=np.uint8)
        start = 0
        for plane in reversed(range(dtype.itemsize)):
            if data.nbytes - start < _PLANE_LENGTH.size:
                raise ProtocolError("bad_tensor", "lossless: a plane is missing")
            (length,) = _PLANE_LENGTH.unpack_from(data, start)
            start += _PLANE_LENGTH.size
            if length > min(values, data.nbytes - start):
                raise ProtocolError("bad_tensor", f"lossless: a plane of {length} bytes")
            part = data[start : start + length]
            plain = part if length == values else _decompress_plane(part, values)
            bytes_VP[:, plane] = np.frombuffer(plain, dtype=np.uint8)
            start += length
        if start != data.nbytes:
            raise ProtocolError("bad_tensor", "lossless: bytes after the last plane")
        return torch.from_numpy(bytes_VP).view(dtype).view(meta.shape).to(device)


def _decompress_plane(frame: memoryview, size: int) -> bytes:
    """The `size` bytes of a frame. Raises `ProtocolError` before allocating any other size."""
    import zstandard

    try:
        facts = zstandard.get_frame_parameters(frame)
        # The decompressor would allocate the size that the frame announces.
        if facts.content_size != size or facts.dict_id:
            raise ProtocolError("bad_tensor", "lossless: a plane of another size")
        if facts.window_size > max(2 * size, _MIN_WINDOW_BYTES):
            raise ProtocolError("bad_tensor", "lossless: a window larger than the plane")
        plain: bytes = _decompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ProtocolError("bad_tensor", f"lossless: {error}") from None
    if len(plain) != size:
        raise ProtocolError("bad_tensor", "lossless: a plane of another size")
    return plain


def _compressor() -> Any:
    """The thread's compressor: contexts are not thread-safe, and slower to make than to use."""
    if not hasattr(_zstd_contexts, "compressor"):
        import zstandard

        _zstd_contexts.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=False)
    return _zstd_contexts.compressor


def _decompressor() -> Any:
    if not hasattr(_zstd_contexts, "decompressor"):
        import zstandard

        _zstd_contexts.decompressor = zstandard.ZstdDecompressor()
    return _zstd_contexts.decompressor
