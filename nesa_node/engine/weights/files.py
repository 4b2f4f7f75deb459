"""Readers of a checkpoint's files, and progress reports of long loads.

The header of a safetensors file is parsed here rather than by the `safetensors` library, which maps
the file: mapped pages count as resident memory, and a handle kept open over a span doubles its
peak. Plain reads into the final tensor peak at the size of the span.

Small files beside the weights are on an allowlist with their maximum sizes: repositories are
untrusted, and transformers reads whatever they hold. So oversized files are rejected before they
are downloaded, and again before they are parsed.
"""

from __future__ import annotations

import json
import math
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bars
from torch import Tensor

from nesa_node.core.errors import CorruptCheckpointError, NesaError, UnsupportedModelError
from nesa_node.core.logging import get_logger
from nesa_node.engine.kernels.machine_code import allocate_in_huge_pages

log = get_logger(__name__)

INDEX_FILE = "model.safetensors.index.json"
DIFFUSION_INDEX_FILE = "diffusion_pytorch_model.safetensors.index.json"
"""Of diffusers' networks."""
MAX_CONFIG_BYTES = 1 << 20
MAX_INDEX_BYTES = 32 << 20
MAX_TOKENIZER_BYTES = 40 << 20
_MAX_COMMAS = 1_000_000
_MAX_BRACKETS = 500_000
"""Twice those of known headers and indices. Parsing takes up to 170 MiB and 0.8 s at these."""
_MAX_REASON_CHARS = 300

MAX_SIDE_FILE_BYTES = {
    "config.json": MAX_CONFIG_BYTES,
    "model_index.json": MAX_CONFIG_BYTES,
    "scheduler_config.json": MAX_CONFIG_BYTES,
    "generation_config.json": MAX_CONFIG_BYTES,
    "preprocessor_config.json": MAX_CONFIG_BYTES,
    "processor_config.json": MAX_CONFIG_BYTES,
    "chat_template.jinja": MAX_CONFIG_BYTES,
    "chat_template.json": MAX_CONFIG_BYTES,
    "special_tokens_map.json": MAX_CONFIG_BYTES,
    "added_tokens.json": 8 << 20,
    "tokenizer_config.json": 8 << 20,
    "merges.txt": 32 << 20,
    "vocab.json": 32 << 20,
    "vocab.txt": 32 << 20,
    "tokenizer.json": MAX_TOKENIZER_BYTES,
    "tokenizer.model": MAX_TOKENIZER_BYTES,
    "tekken.json": MAX_TOKENIZER_BYTES,
    "spiece.model": MAX_TOKENIZER_BYTES,
    "sentencepiece.bpe.model": MAX_TOKENIZER_BYTES,
    "source.spm": MAX_TOKENIZER_BYTES,
    "target.spm": MAX_TOKENIZER_BYTES,
    INDEX_FILE: MAX_INDEX_BYTES,
    DIFFUSION_INDEX_FILE: MAX_INDEX_BYTES,
}
"""Maximum size in bytes of every file that is read beside the weights. The largest known in the
supported families: 33 MiB for a tokenizer of 262,144 tokens, 9 MiB for an index of 91,991 tensors.
"""


def check_size(name: str, size: int, *, where: str) -> None:
    """Raises `CorruptCheckpointError` if side file `name` of `where` exceeds its maximum size."""
    most = MAX_SIDE_FILE_BYTES[name]
    if size > most:
        raise CorruptCheckpointError(
            f"{name} of {where} has {size / 2**20:.1f} MiB; at most {most >> 20} MiB of it are "
            "read, so that this is not the file that it claims to be"
        )


def check_side_files(folder: Path) -> None:
    """Raises `CorruptCheckpointError` if a side file in `folder` exceeds its maximum size."""
    for name in MAX_SIDE_FILE_BYTES:
        path = folder / name
        if path.is_file():
            check_size(name, path.stat().st_size, where=str(folder))


def read_json(path: Path) -> Any:
    """Parse a side file.

    Raises `CorruptCheckpointError` where it is too large or not JSON, and `FileNotFoundError`.
    """
    with path.open("rb") as stream:
        content = stream.read(MAX_SIDE_FILE_BYTES[path.name] + 1)
    check_size(path.name, len(content), where=str(path.parent))
    return parse_json(content, what=str(path))


def has_more_values(content: bytes, *, commas: int, brackets: int) -> bool:
    """Whether JSON text has more values than these limits.

    Checked before parsing: a value of two or three bytes takes tens of times that memory, and
    parsing holds the GIL.
    """
    opening = content.count(b"[") + content.count(b"{")
    return content.count(b",") > commas or opening > brackets


def parse_json(content: bytes, *, what: str) -> Any:
    """Parse untrusted JSON.

    Raises `CorruptCheckpointError` for invalid JSON, too many values or too deep nesting.
    """
    if has_more_values(content, commas=_MAX_COMMAS, brackets=_MAX_BRACKETS):
        raise CorruptCheckpointError(
            f"{what} has more values than any model's: {_MAX_COMMAS:,} commas or "
            f"{_MAX_BRACKETS:,} brackets"
        )
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{what} is not JSON ({error})") from error


@contextmanager
def convert_parse_errors(what: str) -> Iterator[None]:
    """Converts any error of a library that parses a side file to `CorruptCheckpointError`.

    transformers and tokenizers do not validate files: a wrong type raises a `TypeError` or an
    `AttributeError`, and a panic of tokenizers is not even an `Exception`.
    """
    try:
        yield
    except NesaError:
        raise
    except Exception as error:
        raise _make_corrupt_error(what, error) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise _make_corrupt_error(what, error) from error


def _make_corrupt_error(what: str, error: BaseException) -> CorruptCheckpointError:
    reason = " ".join(str(error).split())[:_MAX_REASON_CHARS]
    return CorruptCheckpointError(f"{what} cannot be read: {type(error).__name__}: {reason}")


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
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""Those of 8-bit floats are of quantized checkpoints (`formats/`)."""


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

    @property
    def files(self) -> tuple[str, ...]:
        return (self.file,)

    def read(self, folder: Path) -> Tensor:
        """As `read_tensor`."""
        return read_tensor(folder, self)


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
    tensors: dict[str, TensorInfo] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            info = _parse_entry(file, entry["dtype"], shape, (begin, end), data_start=8 + length)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpointError(f"{where}: bad header entry {name!r} ({error})") from error
        if end > size - 8 - length:
            raise CorruptCheckpointError(f"{where}: {name!r} lies beyond the end of the file")
        tensors[name] = info
    return tensors


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
    """Read one tensor into new CPU memory. Raises `CorruptCheckpointError` for a truncated file."""
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


_LOG_INTERVAL_S = 5.0


class Progress(Protocol):
    """Callback with `done` of `total` bytes of a task ("loading blocks"), from any thread."""

    def __call__(self, task: str, done: int, total: int) -> None: ...


@contextmanager
def show_progress() -> Iterator[Progress]:
    """Yield a `Progress` that draws bars on a terminal, and else logs a line every few seconds."""
    if not sys.stderr.isatty():
        yield _ProgressLog()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Bars(*columns, TransferSpeedColumn(), console=Console(stderr=True)) as bars:
        tasks: dict[str, object] = {}

        def show(task: str, done: int, total: int) -> None:
            if task not in tasks:
                tasks[task] = bars.add_task(task, total=total)
            bars.update(tasks[task], completed=done, total=total)  # type: ignore[arg-type]

        yield show


class _ProgressLog:
    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def __call__(self, task: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done < total and now - self._last.get(task, 0.0) < _LOG_INTERVAL_S:
            return
        self._last[task] = now
        log.info("loading_progressed", task=task, done_mib=done >> 20, total_mib=total >> 20)
