"""Ctrl-C during imports: immediate exit of the process.

`KeyboardInterrupt` within an import may surface as an `ImportError`, or crash a C extension that is
half initialised. No resources are held then, so the process can exit at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

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
