"""Allowlist of a checkpoint's small files beside its weights, with their maximum sizes.

Repositories are untrusted, and transformers reads whatever they hold. So oversized files are
rejected before they are downloaded, and again before they are parsed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nesa_node.core.errors import CorruptCheckpointError, NesaError

INDEX_FILE = "model.safetensors.index.json"
MAX_CONFIG_BYTES = 1 << 20
MAX_INDEX_BYTES = 32 << 20
MAX_TOKENIZER_BYTES = 40 << 20
_MAX_COMMAS = 1_000_000
_MAX_BRACKETS = 500_000
"""Twice those of known headers and indices. Parsing takes up to 170 MiB and 0.8 s at these."""
_MAX_REASON_CHARS = 300

MAX_SIDE_FILE_BYTES = {
    "config.json": MAX_CONFIG_BYTES,
    "generation_config.json": MAX_CONFIG_BYTES,
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
    INDEX_FILE: MAX_INDEX_BYTES,
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
