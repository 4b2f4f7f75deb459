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
_ADVICE = {
    "run": "hold fewer blocks (--num-blocks), use --quant-type int8, or end other programs",
    "demo": "give a smaller --model, fewer --nodes, or end other programs",
    "eval": "give a smaller MODEL or --context, or end other programs",
}
"""By command; the others hold only the ends of a model, of which there is no less to hold."""
_ADVICE_ELSE = "end other programs"


def check_address_space() -> None:
    """Raises `InsufficientMemoryError` if `ulimit -v` leaves too little to import torch."""
    limit = _address_space_limit()
    if limit is not None and limit < MIN_ADDRESS_SPACE_BYTES:
        raise InsufficientMemoryError(
            f"`ulimit -v` allows {limit >> 20} MiB of address space, and at least "
            f"{MIN_ADDRESS_SPACE_BYTES >> 20} MiB are needed: raise it (`ulimit -v unlimited`)"
        )


def as_memory_error(error: BaseException, command: str) -> InsufficientMemoryError | None:
    """`error` in our words if it means that memory ran out, as Python, torch or the system say.

    The advice is for `command`, the first word of the command line.
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
    """In bytes; None where there is none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit
