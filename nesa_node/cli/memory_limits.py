"""Too little memory: told before torch is imported where that is possible, and as one error."""

from __future__ import annotations

import errno
import resource

from nesa_node.core.errors import InsufficientMemoryError

MIN_ADDRESS_SPACE_BYTES = 1280 * 2**20
"""Bytes of address space that torch and hivemind take before any model is opened.
With less they end the process from native code (`std::bad_alloc`, or a segmentation fault)."""

_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "cannot allocate memory",
    "failed to map segment",
    "out of memory",
    "can't start new thread",
    "bad_alloc",
)
_ADVICE = "hold fewer blocks (--num-blocks), use --quant-type int8, or end other programs"


def check_address_space() -> None:
    """Raises `InsufficientMemoryError` if `ulimit -v` leaves too little to import torch."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < MIN_ADDRESS_SPACE_BYTES:
        raise InsufficientMemoryError(
            f"`ulimit -v` allows {limit >> 20} MiB of address space, and at least "
            f"{MIN_ADDRESS_SPACE_BYTES >> 20} MiB are needed: raise it (`ulimit -v unlimited`)"
        )


def as_memory_error(error: BaseException) -> InsufficientMemoryError | None:
    """`error` in our words if it means that memory ran out, as Python, torch or the system say."""
    text = str(error).lower()
    if isinstance(error, OSError):
        short = error.errno == errno.ENOMEM
    elif isinstance(error, ImportError | RuntimeError):
        short = any(words in text for words in _WORDS)
    else:
        short = isinstance(error, MemoryError)
    if not short:
        return None
    detail = next(iter(str(error).splitlines()), "")
    return InsufficientMemoryError(
        f"out of memory{f' ({detail[:200]})' if detail else ''}: {_ADVICE}"
    )
