"""Ctrl-C while modules are imported.

`KeyboardInterrupt` within an import may surface as an `ImportError`, or as a crash of a C extension
that is half initialised. Nothing is held then: the process can end on the spot.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

INTERRUPTED = 130


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """SIGINT ends the process with `INTERRUPTED`, without any `finally`: only around imports.

    Does nothing outside the main thread, or where SIGINT is ignored or handled already.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        from nesa_node.core.waiting import waiting

        with waiting("Python to load its libraries"):
            yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(_number: int, _frame: object) -> None:
    # Their readers may have gone; and what was interrupted may be a write to stdout.
    with suppress(OSError, RuntimeError):
        sys.stdout.flush()
    with suppress(OSError):
        os.write(sys.stderr.fileno(), b"interrupted\n")
    os._exit(INTERRUPTED)
