"""The small files of a checkpoint beside its weights: which are read, and how large they may be.

A repository is what its author puts there, and transformers reads whatever it finds. So a file is
refused by its size before it is downloaded, and again before it is parsed.
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
"""The headers and indices known have half as many. So many take up to 170 MiB and 0.8 s."""
_SHOWN_CHARS = 300

SIDE_FILES = {
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
"""Every file beside the weights that is read, and its largest size in bytes. The largest of the
families served: 33 MiB for a tokenizer of 262,144 tokens, 9 MiB for an index of 91,991 tensors."""


def check_size(name: str, size: int, *, where: str) -> None:
    """Raises `CorruptCheckpointError` if the side file `name` of `where` is too large to read."""
    most = SIDE_FILES[name]
    if size > most:
        raise CorruptCheckpointError(
            f"{name} of {where} has {size / 2**20:.1f} MiB; at most {most >> 20} MiB of it are "
            "read, so that this is not the file that it claims to be"
        )


def check_side_files(folder: Path) -> None:
    """Raises `CorruptCheckpointError` if a side file in `folder` is too large to be parsed."""
    for name in SIDE_FILES:
        path = folder / name
        if path.is_file():
            check_size(name, path.stat().st_size, where=str(folder))


def read_json(path: Path) -> Any:
    """Return what a side file holds.

    Raises `CorruptCheckpointError` where it is too large or no JSON, and `FileNotFoundError`.
    """
    with path.open("rb") as stream:
        content = stream.read(SIDE_FILES[path.name] + 1)
    check_size(path.name, len(content), where=str(path.parent))
    return parse_json(content, what=str(path))


def is_crowded(content: bytes, *, commas: int, brackets: int) -> bool:
    """Whether JSON has more values than that, before it is parsed: a value takes tens of times the
    memory of its two or three bytes, and no other thread runs meanwhile."""
    opening = content.count(b"[") + content.count(b"{")
    return content.count(b",") > commas or opening > brackets


def parse_json(content: bytes, *, what: str) -> Any:
    """Raises `CorruptCheckpointError`, also for JSON that is nested too deeply to be parsed, or
    has too many values."""
    if is_crowded(content, commas=_MAX_COMMAS, brackets=_MAX_BRACKETS):
        raise CorruptCheckpointError(
            f"{what} has more values than any model's: {_MAX_COMMAS:,} commas or "
            f"{_MAX_BRACKETS:,} brackets"
        )
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{what} is not JSON ({error})") from error


@contextmanager
def parsing(what: str) -> Iterator[None]:
    """Raises `CorruptCheckpointError` for whatever a library cannot make of a side file.

    transformers and tokenizers take for granted what a file holds: a wrong type is a `TypeError` or
    an `AttributeError` somewhere, and a panic of tokenizers' is no `Exception` at all.
    """
    try:
        yield
    except NesaError:
        raise
    except Exception as error:
        raise _corrupt(what, error) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise _corrupt(what, error) from error


def _corrupt(what: str, error: BaseException) -> CorruptCheckpointError:
    reason = " ".join(str(error).split())[:_SHOWN_CHARS]
    return CorruptCheckpointError(f"{what} cannot be read: {type(error).__name__}: {reason}")
