"""Reader of single tensors from safetensors files.

The header is parsed here rather than by the `safetensors` library, which maps the file: mapped
pages count as resident memory, and a handle kept open over a span doubles its peak. Plain reads
into the final tensor peak at the size of the span.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nesa_node.core.errors import CorruptCheckpointError, UnsupportedModelError
from nesa_node.engine.kernels.huge_pages import allocate_in_huge_pages
from nesa_node.engine.weights.side_files import parse_json

MAX_HEADER_BYTES = 25_000_000
"""The limit of huggingface_hub; the largest header known has 9 MB."""
MAX_DIMENSIONS = 8

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Location of a tensor: `nbytes` at `offset` of `file` in the checkpoint's folder."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    file: str
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path, file: str) -> dict[str, TensorInfo]:
    """Return the tensors of the safetensors file at `path`. Every offset lies within the file.

    Raises `CorruptCheckpointError`, and `UnsupportedModelError` for an unsupported dtype.
    """
    with path.open("rb") as stream:

        def read(start: int, count: int) -> bytes:
            stream.seek(start)
            return stream.read(count)

        return parse_header(read, path.stat().st_size, file, where=str(path))


def parse_header(
    read: Callable[[int, int], bytes], size: int, file: str, *, where: str
) -> dict[str, TensorInfo]:
    """Parse the header of a file of `size` bytes, read with `read(start, count)`."""
    prefix = read(0, 8)
    if len(prefix) < 8:
        raise CorruptCheckpointError(f"{where}: not a safetensors file (it has {size} bytes)")
    (length,) = struct.unpack("<Q", prefix)
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise CorruptCheckpointError(
            f"{where}: its header claims {length} bytes, the file has {size}; download it again"
        )
    header = parse_json(read(8, length), what=f"the header of {where}")
    if not isinstance(header, dict):
        raise CorruptCheckpointError(f"{where}: its header is no JSON object")
    data = 8 + length
    return dict(_parse_entries(where, file, header, data_start=data, data_size=size - data))


def _parse_entry(
    file: str, dtype: str, shape: tuple[int, ...], offsets: tuple[int, int], *, data_start: int
) -> TensorInfo:
    """Describe one header entry.

    Raises `ValueError` for a size that does not match the shape, and `UnsupportedModelError`.
    """
    if dtype not in DTYPES:
        raise UnsupportedModelError(
            f"{file} holds tensors of dtype {dtype}, which cannot be served; "
            "use a checkpoint in float32, float16 or bfloat16"
        )
    begin, end = offsets
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"a tensor of {len(shape)} dimensions")
    if not all(type(number) is int for number in (*shape, begin, end)):
        raise ValueError("shapes and offsets are integers")
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if not 0 <= begin <= end or end - begin != nbytes or any(dim < 0 for dim in shape):
        raise ValueError(f"{dtype}{list(shape)} cannot lie at {begin}:{end}")
    return TensorInfo(shape, DTYPES[dtype], nbytes, file, data_start + begin)


def read_tensor(folder: Path, info: TensorInfo) -> Tensor:
    """Read one tensor into new CPU memory.

    Raises `CorruptCheckpointError` for a truncated file.
    """
    tensor = allocate_in_huge_pages(info.shape, info.dtype)
    if not info.nbytes:
        return tensor
    target = memoryview(tensor.view(-1).view(torch.uint8).numpy().data)
    with (folder / info.file).open("rb", buffering=0) as stream:
        stream.seek(info.offset)
        filled = 0
        while filled < info.nbytes:
            count = stream.readinto(target[filled:])
            if not count:
                raise CorruptCheckpointError(f"{folder / info.file} ended early; download it again")
            filled += count
    return tensor


def read_window(folder: Path, info: TensorInfo, start: int, length: int) -> bytes:
    """Read `length` raw bytes of a tensor from its byte `start` on."""
    with (folder / info.file).open("rb", buffering=0) as stream:
        stream.seek(info.offset + start)
        return stream.read(length)


def _parse_entries(
    where: str, file: str, header: dict[str, Any], *, data_start: int, data_size: int
) -> Iterator[tuple[str, TensorInfo]]:
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            begin, end = entry["data_offsets"]
            info = _parse_entry(
                file, entry["dtype"], tuple(entry["shape"]), (begin, end), data_start=data_start
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpointError(f"{where}: bad header entry {name!r} ({error})") from error
        if end > data_size:
            raise CorruptCheckpointError(f"{where}: {name!r} lies beyond the end of the file")
        yield name, info
