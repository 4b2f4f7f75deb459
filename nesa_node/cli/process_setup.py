"""Setup of the process before torch is imported: Ctrl-C, memory errors, idle threads.

`KeyboardInterrupt` within an import may surface as an `ImportError`, or crash a C extension that is
half initialised. No resources are held then, so the process can exit at once. Too little memory
becomes one error class. The spin time of idle OpenMP threads is read by torch at its import.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress

from nesa_node.core.errors import InsufficientMemoryError

INTERRUPTED_EXIT_CODE = 130


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Exit with `INTERRUPTED_EXIT_CODE` on SIGINT, without running any `finally`: only around
    imports.

    Does nothing outside the main thread, or if SIGINT is ignored or has another handler.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    signal.signal(signal.SIGINT, _exit_now)
    try:
        from nesa_node.core.wait_tracking import track_wait

        with track_wait("Python to load its libraries"):
            yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit_now(_number: int, _frame: object) -> None:
    # Readers of the streams may have exited, and the signal may have interrupted a write to stdout.
    with suppress(OSError, RuntimeError):
        sys.stdout.flush()
    with suppress(OSError):
        os.write(sys.stderr.fileno(), b"interrupted\n")
    os._exit(INTERRUPTED_EXIT_CODE)


MIN_ADDRESS_SPACE_BYTES = 1280 * 2**20
"""Address space that torch and hivemind need before a model is opened. With less, native code
ends the process (`std::bad_alloc`, or a segmentation fault)."""

_OUT_OF_MEMORY_PHRASES = (
    "can't allocate memory",
    "not enough memory",
    "cannot allocate memory",
    "failed to map segment",
    "out of memory",
    "can't start new thread",
    "bad_alloc",
)
_COMMAND_ADVICE = {
    "run": "hold fewer blocks (--num-blocks), use --quant-type int8, or end other programs",
    "demo": "give a smaller --model, fewer --nodes, or end other programs",
    "eval": "give a smaller MODEL or --context, or end other programs",
}
"""Advice by command. Commands that are missing here hold only embedding and head of a model."""
_DEFAULT_ADVICE = "end other programs"


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
        short = any(words in text for words in _OUT_OF_MEMORY_PHRASES)
    else:
        short = isinstance(error, MemoryError)
    if not short:
        return None
    detail = next(iter(str(error).splitlines()), "")
    advice = _COMMAND_ADVICE.get(command, _DEFAULT_ADVICE)
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


OPENMP_SPIN_COUNT = 20_000
"""Iterations that an idle thread of GNU OpenMP spins before it sleeps, tenths of a millisecond: the
time between two matrix products of a step. GNU's default of 300,000 occupies a core for
milliseconds after each step; with 0 each product wakes threads, which takes as long as the product.
"""
_OPENMP_WAIT_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_openmp_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Shorten the spinning of idle threads here and in child processes, unless the user set it."""
    if not any(name in environment for name in _OPENMP_WAIT_VARIABLES):
        environment["GOMP_SPINCOUNT"] = str(OPENMP_SPIN_COUNT)
