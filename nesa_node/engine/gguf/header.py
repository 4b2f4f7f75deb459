"""Reader of a GGUF file's header: its metadata, and where its tensors lie. No tensor is read.

Files are untrusted. Every count, length and offset is compared with a limit and with what is left
of the file before memory is taken for it, so that a header takes at most a few times its own size.

Layout (ggml's `docs/gguf.md`): magic, version, number of tensors and of metadata; metadata (key,
type, value); tensors (name, dimensions, type, offset); padding; the tensors' bytes.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nesa_node.core.errors import (
    CorruptCheckpointError,
    ModelNotFoundError,
    UnsupportedModelError,
)

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 64 << 20
"""Of a file's metadata and list of tensors; the largest known, of 262,144 tokens, have 16 MiB."""
MAX_METADATA = 65_536
MAX_TENSORS = 100_000
MAX_ARRAY_ITEMS = 2_000_000
"""Of all arrays of a file together: tokens, scores, types and merges."""
MAX_NAME_BYTES = 1024
MAX_STRING_BYTES = 8 << 20
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16
MAX_PARTS = 2048
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""Types of metadata that have a fixed size, as numpy's."""
_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class BlockType(NamedTuple):
    """How a type of ggml stores numbers: so many in a block of so many bytes."""

    name: str
    elements: int
    nbytes: int


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
}
"""Types that can be read, by their numbers in ggml: all that the package `gguf` dequantizes."""

MetadataValue = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A stored tensor: `shape` as torch has it, and `nbytes` at `offset` of `file`."""

    name: str
    shape: tuple[int, ...]
    kind: int
    """Key in `BLOCK_TYPES`."""
    file: Path
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def block(self) -> BlockType:
        return BLOCK_TYPES[self.kind]

    @property
    def nbytes(self) -> int:
        return self.numel // self.block.elements * self.block.nbytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a file says of itself; of a file in parts, the first part's metadata and all tensors."""

    path: Path
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, GgufTensor]
    digest: str
    """SHA-256 of the (first) file's header, in hex."""

    @property
    def name(self) -> str:
        """The file's name without its ending and the number of the part."""
        part = _PART_NAME.fullmatch(self.path.name)
        return part[1] if part else self.path.name.removesuffix(".gguf")


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file, and of its further parts if it was split.

    Any part names the whole. Raises `CorruptCheckpointError`, `ModelNotFoundError` for a missing
    part, and `UnsupportedModelError` for versions and types of tensors that cannot be read.
    """
    paths = list_parts(path)
    first, *further = (_read_one(each) for each in paths)
    tensors = dict(first.tensors)
    for part in further:
        if doubled := next((name for name in part.tensors if name in tensors), None):
            raise CorruptCheckpointError(f"{part.path} has {doubled!r}, as an earlier part does")
        tensors |= part.tensors
        if len(tensors) > MAX_TENSORS:
            raise CorruptCheckpointError(f"{path} has over {MAX_TENSORS} tensors in its parts")
    count = first.metadata.get("split.count", 1)
    if count not in (0, len(paths)):
        raise CorruptCheckpointError(f"{path} is one of {count} parts, by its name {len(paths)}")
    return GgufHeader(first.path, first.metadata, tensors, first.digest)


def part_paths(path: Path) -> list[Path]:
    """The files of which `path` is one, in order, by its name. Raises `CorruptCheckpointError`."""
    part = _PART_NAME.fullmatch(path.name)
    if part is None:
        return [path]
    count = int(part[3])
    if not 0 < int(part[2]) <= count <= MAX_PARTS:
        raise CorruptCheckpointError(
            f"{path.name} is not one of 1 to {MAX_PARTS} parts by its name"
        )
    names = (f"{part[1]}-{index:05d}-of-{part[3]}.gguf" for index in range(1, count + 1))
    return [path.with_name(name) for name in names]


def list_parts(path: Path) -> list[Path]:
    """The files of which `path` is one. Raises `ModelNotFoundError` for a missing one."""
    paths = part_paths(path)
    if missing := [each.name for each in paths if not each.is_file()]:
        raise ModelNotFoundError(
            f"{path.parent} lacks {', '.join(missing[:4])}, parts of one model"
        )
    return paths


def _read_one(path: Path) -> GgufHeader:
    with path.open("rb", buffering=0) as stream:
        cursor = _Cursor(stream, path.stat().st_size, str(path))
        if cursor.take(4) != MAGIC:
            raise CorruptCheckpointError(f"{path} is no GGUF file: it does not begin with GGUF")
        version = cursor.integer("<u4")
        if version not in VERSIONS:
            big = version in (each << 24 for each in VERSIONS)
            what = "has big-endian numbers" if big else f"is of GGUF's version {version}"
            raise UnsupportedModelError(f"{path} {what}; versions 2 and 3, little-endian, are read")
        num_tensors, num_metadata = cursor.integer("<u8"), cursor.integer("<u8")
        cursor.check_count(num_metadata, MAX_METADATA, 14, "values of metadata")
        cursor.check_count(num_tensors, MAX_TENSORS, 33, "tensors")
        metadata = _read_metadata(cursor, num_metadata)
        tensors = _read_tensors(cursor, num_tensors, path)
        alignment = _find_alignment(metadata, path)
        start = -(-cursor.position // alignment) * alignment
        placed = _place(tensors, start, alignment, cursor)
        return GgufHeader(path, metadata, placed, cursor.digest())


@dataclass(slots=True)
class _Cursor:
    """Reads a header from its beginning on, no byte beyond its limits."""

    stream: FileIO
    size: int
    where: str
    position: int = 0
    array_items: int = 0
    _buffer: bytearray = field(default_factory=bytearray)

    def corrupt(self, reason: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self.where}: {reason}; download it again")

    def take(self, count: int) -> bytes:
        """The next `count` bytes. Raises `CorruptCheckpointError` where there are fewer."""
        end = self.position + count
        if end > len(self._buffer):
            self._fill(end)
        taken = bytes(self._buffer[self.position : end])
        self.position = end
        return taken

    def _fill(self, end: int) -> None:
        if end > self.size:
            raise self.corrupt(f"it ends within its header (it has {self.size} bytes)")
        if end > MAX_HEADER_BYTES:
            raise self.corrupt(f"its header has more than {MAX_HEADER_BYTES >> 20} MiB")
        wanted = min(max(end, 2 * len(self._buffer), 1 << 16), self.size, MAX_HEADER_BYTES)
        while len(self._buffer) < wanted:
            more = self.stream.read(wanted - len(self._buffer))
            if not more:
                raise self.corrupt("it ended early")
            self._buffer += more

    def number(self, dtype: str) -> int | float | bool:
        kind = np.dtype(dtype)
        found: int | float | bool = np.frombuffer(self.take(kind.itemsize), kind)[0].item()
        return found

    def integer(self, dtype: str) -> int:
        return int(self.number(dtype))

    def string(self, most: int = MAX_STRING_BYTES) -> str:
        (length,) = struct.unpack("<Q", self.take(8))
        if length > most:
            raise self.corrupt(f"a text at byte {self.position} claims {length} bytes")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.corrupt(f"a text at byte {self.position} is not UTF-8") from error

    def check_count(self, count: int, most: int, least_bytes: int, what: str) -> None:
        """Raises `CorruptCheckpointError` for more items than `most`, or than the file has room."""
        if count > min(most, (self.size - self.position) // least_bytes):
            raise self.corrupt(f"it claims {count} {what}")

    def digest(self) -> str:
        return hashlib.sha256(self._buffer[: self.position]).hexdigest()


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, MetadataValue]:
    metadata: dict[str, MetadataValue] = {}
    for _ in range(count):
        key = cursor.string(MAX_NAME_BYTES)
        if key in metadata:
            raise cursor.corrupt(f"its metadata has {key!r:.80} twice")
        metadata[key] = _read_value(cursor, cursor.integer("<u4"), key)
    return metadata


def _read_value(cursor: _Cursor, kind: int, key: str) -> MetadataValue:
    if kind in _NUMBERS:
        return cursor.number(_NUMBERS[kind])
    if kind == _STRING:
        return cursor.string()
    if kind != _ARRAY:
        raise cursor.corrupt(f"its {key!r:.80} is of the unknown type {kind}")
    items, count = cursor.integer("<u4"), cursor.integer("<u8")
    left = MAX_ARRAY_ITEMS - cursor.array_items
    if items == _STRING:
        cursor.check_count(count, left, 8, f"texts in {key!r:.80}")
        cursor.array_items += count
        return [cursor.string() for _ in range(count)]
    if items not in _NUMBERS:
        raise cursor.corrupt(f"its {key!r:.80} is a list of the type {items}, which is none")
    dtype = np.dtype(_NUMBERS[items])
    cursor.check_count(count, left, dtype.itemsize, f"numbers in {key!r:.80}")
    cursor.array_items += count
    found: list[int] | list[float] = np.frombuffer(
        cursor.take(count * dtype.itemsize), dtype
    ).tolist()
    return found


def _read_tensors(cursor: _Cursor, count: int, path: Path) -> list[GgufTensor]:
    """The list of tensors; their offsets are from the beginning of the tensors' bytes."""
    tensors = []
    names: set[str] = set()
    for _ in range(count):
        name = cursor.string(MAX_NAME_BYTES)
        if name in names:
            raise cursor.corrupt(f"it has the tensor {name!r:.80} twice")
        names.add(name)
        dimensions = cursor.integer("<u4")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise cursor.corrupt(f"{name!r:.80} has {dimensions} dimensions")
        sizes = struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions))
        kind, offset = struct.unpack("<IQ", cursor.take(12))
        if kind not in BLOCK_TYPES:
            known = ", ".join(block.name for block in BLOCK_TYPES.values())
            raise UnsupportedModelError(
                f"{path}: {name!r:.80} is of ggml's type {kind}, which cannot be read; "
                f"these can: {known}"
            )
        tensor = GgufTensor(name, tuple(reversed(sizes)), kind, path, offset)
        if 0 in sizes or sizes[0] % tensor.block.elements:
            raise cursor.corrupt(
                f"{name!r:.80} has the shape {list(tensor.shape)}, whose rows are not made of "
                f"blocks of {tensor.block.elements} numbers ({tensor.block.name})"
            )
        tensors.append(tensor)
    return tensors


def _find_alignment(metadata: Mapping[str, MetadataValue], path: Path) -> int:
    found = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    is_size = type(found) is int and 8 <= found <= MAX_ALIGNMENT and not found & (found - 1)
    if not is_size:
        raise CorruptCheckpointError(f"{path}: its tensors are aligned to {found!r:.80} bytes")
    assert isinstance(found, int)
    return found


def _place(
    tensors: list[GgufTensor], start: int, alignment: int, cursor: _Cursor
) -> dict[str, GgufTensor]:
    """Tensors by name, with offsets from the file's beginning.

    Raises `CorruptCheckpointError` for what lies beyond the file's end, or overlaps.
    """
    placed = {}
    for tensor in tensors:
        if tensor.offset % alignment:
            raise cursor.corrupt(f"{tensor.name!r:.80} is not aligned to {alignment} bytes")
        if start + tensor.offset + tensor.nbytes > cursor.size:
            raise cursor.corrupt(f"{tensor.name!r:.80} lies beyond the end of the file")
        placed[tensor.name] = GgufTensor(
            tensor.name, tensor.shape, tensor.kind, tensor.file, start + tensor.offset
        )
    ordered = sorted(placed.values(), key=lambda tensor: tensor.offset)
    for tensor, after in pairwise(ordered):
        if tensor.offset + tensor.nbytes > after.offset:
            raise cursor.corrupt(f"{tensor.name!r:.80} and {after.name!r:.80} overlap")
    return placed
