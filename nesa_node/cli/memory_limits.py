"""Detection of too little memory, before torch is imported where possible, as one error class."""

from __future__ import annotations

import errno
import resource

from nesa_node.core.errors import InsufficientMemoryError

MIN_ADDRESS_SPACE_BYTES = 1280 * 2**20
"""Address space that torch and hivemind need before a model is opened. With less, native code
ends the process (`std::bad_alloc`, or a segmentation fault)."""

_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "cannot allocate memory",
    "failed to map segment",
    "out of memory",
    "can't start new thread",
    "bad_alloc",
)
_ADVICE = {
    "run": "hold fewer blocks (--num-blocks), use --quant-type int8, or end other programs",
    "demo": "give a smaller --model, fewer --nodes, or end other programs",
    "eval": "give a smaller MODEL or --context, or end other programs",
}
"""Advice by command. Commands that are missing here hold only embedding and head of a model."""
_ADVICE_ELSE = "end other programs"


def check_address_space() -> None:
    """Raise `InsufficientMemoryError` if `ulimit -v` is too low to import torch."""
    limit = _address_space_limit()
    if limit is not None and limit < MIN_ADDRESS_SPACE_BYTES:
        raise InsufficientMemoryError(
            f"`ulimit -v` allows {limit >> 20} MiB of address space, and at least "
            f"{MIN_ADDRESS_SPACE_BYTES >> 20} MiB are needed: raise it (`ulimit -v unlimited`)"
        )


def as_memory_error(error: BaseException, command: str) -> InsufficientMemoryError | None:
    """Convert an error of Python, torch or the system that means out of memory, else None.

    The message has advice for `command`, the first word of the command line.
    """
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
    advice = _ADVICE.get(command, _ADVICE_ELSE)
    limit = _address_space_limit()
    if limit is not None:
        raised = f"raise `ulimit -v`, which allows {limit >> 20} MiB of address space"
        advice = f"{raised} (`ulimit -v unlimited`), or {advice}"
    return InsufficientMemoryError(
        f"out of memory{f' ({detail[:200]})' if detail else ''}: {advice}"
    )


def _address_space_limit() -> int | None:
    """Limit of the address space in bytes; None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit
